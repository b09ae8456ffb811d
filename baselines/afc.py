"""AFC in federated learning: distillation with Adaptive Feature Consolidation.

Kang et al., CVPR 2022.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fczoo.baselines._proxy_head import ProxyHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.feature_maps import channel_distance, quarter_taps


@register_method("afc")
@dataclass(frozen=True)
class AFC(ProxyHead):
    """Distillation of the channels of four blocks, weighted by their importance for the loss.

    A ResNet's stages become blocks L/4, L/2, 3L/4 and L, its channels the dimensions of the tokens.
    The importance of a channel is measured over all tokens, the distance over patch tokens. The
    head has several proxies per class, as in PODNet. Clients train and send the proxies of the
    task's classes, the scale eta and, depending on ``tune``, all weights or LoRA pairs. Before a
    task they send, once, count, sum and squares of every local class's features of length 1. After
    each task but the first they train all proxies in one more round on exemplars only and send
    them. After each task they send the sums of squared gradients of each channel over new images
    and exemplars. Memory beyond the model: the teacher, one copy of the tensors trained below the
    head; exemplars at the client.
    """

    paper = (
        'Kang et al., "Class-Incremental Learning by Knowledge Distillation with Adaptive '
        'Feature Consolidation", CVPR 2022'
    )
    formulas = r"""
    $$L = L_{nca} + \lambda \sqrt{C_{seen} / C_{new}}\;
    \operatorname{mean}_{l,c}\; I_{l,c} \lVert a_{l,c} - b_{l,c} \rVert$$

    $$I_{l,c} \propto \sum_x \sum_p \Bigl( \frac{\partial L_{nca}(x)}{\partial h_{l,p,c}} \Bigr)^2$$

    $a_{l,c}$ and $b_{l,c}$ are vectors over the patch tokens: the squares of channel $c$ in block
    $l$ under the model and the teacher, each vector divided by its length. $h_{l,p,c}$ is this
    channel at token $p$ at the end of the previous task, and the mean of $I_{l,c}$ over a block is
    1. $L_{nca}$ as in PODNet.
    """

    strength: float = option(
        4.0, "lambda, weight of the distillation (CIFAR-100: 4; ImageNet: 10)", low=0
    )

    def training(self) -> Training:
        training = super().training()
        end: set[TaskPhase] = {"task_end"} if self.tune != "head" else set()
        return replace(
            training,
            uploads={**training.uploads, "importance": whole_tensors("parameters")},
            collect_at={*training.collect_at, *end},
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: keep the importance measured after the last task; before the first it is 1.
        none = {"importance": torch.ones(len(quarter_taps(backbone.depth)), backbone.token_dim)}
        return {**none, **super().begin_task(state, task, backbone, rng)}

    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        # Distillation: lambda times the mean over blocks l and channels c of
        # I_{l,c} |a_{l,c} - b_{l,c}|.
        pairs = zip(old, new, ctx.shared["importance"], strict=True)
        return self.strength * torch.stack([channel_distance(a, b, i) for a, b, i in pairs]).mean(0)

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        """Sum the squared gradients of each image's loss per channel, as a task ends.

        Args:
            phase: ``task_start`` for the new proxies, ``task_end`` for the importance.
            backbone: The frozen backbone.
            tree: Broadcast tensors.
            batch: New images and exemplars.
            ctx: The current task.

        Returns:
            ``importance`` [blocks, D], or the sums of ``ProxyHead``.
        """
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Importance: sum over images and tokens of (d L_nca(x) / d h_{l,p,c})^2, the total
        # derivative at the output of each block.
        with torch.enable_grad():
            images = batch.x.detach().requires_grad_()
            taps = quarter_taps(backbone.depth)
            features, activations = backbone.features_and_taps(
                images, taps, select(tree, "full.", "lora.")
            )
            total = (self.nca(features, tree, batch) * batch.w).sum()
            gradients = torch.autograd.grad(total, [activations[tap] for tap in taps])
        return {"importance": torch.stack([g.square().sum((0, 1)) for g in gradients])}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Set the importance of the channels as a task ends.

        Args:
            phase: ``task_start`` for the new proxies, ``task_end`` for the importance.
            state: Current state.
            sums: ``importance`` [blocks, D], or the sums of ``ProxyHead``.
            ctx: Server context.

        Returns:
            The state with ``importance`` [blocks, D], with mean 1 per block; all 1 in a block
                without gradients.
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # I_{l,c}: sum over all clients, divided by the mean over the channels of block l.
        importance = sums["importance"]
        mean = importance.mean(1, keepdim=True)
        return {
            **state,
            "importance": torch.where(mean > 0, importance / mean, torch.ones_like(importance)),
        }
