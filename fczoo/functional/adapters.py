"""AdaptFormer's adapters (Chen et al., NeurIPS 2022), for methods that adapt the first task's network."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone, ViTConfig
from fczoo.core.options import option
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, Moment, Optim, ServerContext, Task, Training
from fczoo.functional.cosine import cosines
from fczoo.functional.ridge import Analytic

ADAPTED = "adapter.", "head."


@dataclass(frozen=True)
class Adaptable(Analytic):
    """Base of solved methods that may adapt the network before they solve, in the first task alone.

    With ``adapt=adapter`` clients train adapters in all blocks and a head of cosines with a learnable scale
    in the first task's rounds, by cross-entropy over its classes. Then the head is thrown away and nothing is
    trained any more: all surveys, the first task's at its end included, read the adapted network.
    """

    adapt: Literal["none", "adapter"] = option(
        "none",
        "read the pre-trained network, or one with adapters that clients train in the first task alone",
    )
    bottleneck: int = option(64, "width of the adapters", low=1)
    lr: float = option(0.2, "learning rate of adapters and head, SGD, cosine over the rounds", low=0)
    momentum: float = option(0.9, "its momentum", low=0, high=1)
    weight_decay: float = option(5e-4, "its weight decay", low=0)

    def training(self) -> Training:
        training = super().training()
        if self.adapt == "none":
            return training
        optim = Optim("sgd", self.lr, self.weight_decay, self.momentum, "cosine")
        optims = dict.fromkeys(ADAPTED, optim)
        return replace(
            training, optims=optims, inputs=["images"], averaging="uniform", active=in_the_first_task
        )

    def surveys(self) -> frozenset[Moment]:
        return super().surveys() if self.adapt == "none" else frozenset({"end"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        start = super().begin_task(state, task, backbone, rng)
        if state or self.adapt == "none":
            return start
        bound = backbone.dim**-0.5
        weight = torch.empty(task.size, backbone.dim).uniform_(-bound, bound, generator=rng)
        head = {"head.weight": weight, "head.scale": torch.ones(())}
        return {**start, **adapters(backbone.config, self.bottleneck, rng), **head}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        scores = cosines(self.features(backbone, train, batch), train["head.weight"])
        logits, labels = train["head.scale"] * scores, batch.y - ctx.task.start
        return batch.mean(F.cross_entropy(logits, labels, reduction="none")), {}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return super().absorb(moment, drop(state, "head."), sums, ctx)

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        if self.adapt == "none":
            return super().features(backbone, tree, batch)
        return backbone(batch.x, select(tree, "adapter."))


def adapters(config: ViTConfig, bottleneck: int, rng: torch.Generator) -> Tree:
    """Adapters of every block that change nothing yet: down from U(-1/sqrt D, 1/sqrt D), the rest zero."""
    plugs: Tree = {}
    for i in range(config.depth):
        down = torch.empty(bottleneck, config.dim)
        plugs[f"adapter.{i}.down"] = down.uniform_(-(config.dim**-0.5), config.dim**-0.5, generator=rng)
        plugs[f"adapter.{i}.down_bias"] = torch.zeros(bottleneck)
        plugs[f"adapter.{i}.up"] = torch.zeros(config.dim, bottleneck)
        plugs[f"adapter.{i}.up_bias"] = torch.zeros(config.dim)
    return plugs


def in_the_first_task(task: Task, round: int) -> Collection[str]:
    """``Training.active``: adapters and head in the first task, nothing in the others."""
    return () if task.index else ADAPTED
