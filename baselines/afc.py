"""AFC in federated learning: Class-Incremental Learning by Knowledge Distillation with Adaptive Feature
Consolidation. Kang et al., CVPR 2022.
"""

from dataclasses import dataclass, replace

import torch
from fczoo.baselines.proxies import ProxyHead
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, ServerContext, Task, Training
from fczoo.functional.maps import channel_distance, quarters


@register_method("afc")
@dataclass(frozen=True)
class AFC(ProxyHead):
    """Channels of four depths are distilled by what they mean for the loss; several proxies a class.

    A ResNet's stages become blocks L/4, L/2, 3L/4 and L, its channels the dimensions of the tokens. The
    importance of a channel is measured over all tokens, the distance over patch tokens. Proxies as in
    PODNet. Trained and sent: proxies of the task's classes, the scale eta and, by choice, all weights or
    LoRA pairs; before a task, once, count, sum and squares of every local class's features of length 1;
    after it, all proxies from one more round on exemplars alone, and the sums of squared gradients of each
    channel over new images and exemplars. Memory beyond the model: the teacher, one copy of what is trained
    beneath the head; exemplars at the client.
    """

    paper = "Kang et al., AFC, CVPR 2022"
    formulas = r"""
    $$L = L_{nca} + \lambda \sqrt{C_{seen} / C_{new}}\;
    \operatorname{mean}_{l,c}\; I_{l,c} \lVert a_{l,c} - b_{l,c} \rVert$$

    $$I_{l,c} \propto \sum_x \sum_p \Bigl( \frac{\partial L_{nca}(x)}{\partial h_{l,p,c}} \Bigr)^2$$

    $a_{l,c}$ and $b_{l,c}$ are the squares of channel $c$ in block $l$ over the patch tokens, of length 1,
    under the model and the teacher; $h_{l,p,c}$ is that channel at token $p$ as the last task ends, and the
    mean of $I_{l,c}$ over a block is 1. $L_{nca}$ as in PODNet.
    """

    strength: float = option(4.0, "lambda, weight of the distillation (CIFAR-100; ImageNet: 10)", low=0)

    def training(self) -> Training:
        training = super().training()
        return replace(training, uploads={**training.uploads, "importance": whole("parameters")})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        none = {"importance": torch.ones(len(quarters(backbone.depth)), backbone.dim)}
        return {**none, **super().begin_task(state, task, backbone, rng)}

    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        pairs = zip(old, new, ctx.shared["importance"], strict=True)
        return self.strength * torch.stack([channel_distance(a, b, i) for a, b, i in pairs]).mean(0)

    def surveys(self) -> frozenset[Moment]:
        return super().surveys() | ({"end"} if self.tune != "head" else set())

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        """At the end: squared gradients of each image's own loss at each channel, summed over tokens."""
        if moment == "begin":
            return super().survey(moment, backbone, state, batch, task)
        with torch.enable_grad():
            images = batch.x.detach().requires_grad_()
            taps = quarters(backbone.depth)
            features, seen = backbone.tapped(images, taps, select(state, "full.", "lora."))
            total = (self.nca(features, state, batch) * batch.w).sum()
            gradients = torch.autograd.grad(total, [seen[tap] for tap in taps])
        return {"importance": torch.stack([g.square().sum((0, 1)) for g in gradients])}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Importance [blocks, D] with mean 1 in each block; 1 where no channel matters."""
        if moment == "begin":
            return super().absorb(moment, state, sums, ctx)
        found = sums["importance"]
        mean = found.mean(1, keepdim=True)
        return {**state, "importance": torch.where(mean > 0, found / mean, torch.ones_like(found))}
