"""Adapters of AdaptFormer, for methods that adapt the network in the first task.

Chen et al., "AdaptFormer", NeurIPS 2022.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.training import Optim, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.core.vit_config import ViTConfig
from fczoo.functional.cosine import cosines
from fczoo.functional.ridge import Analytic

ADAPTER_PREFIXES = "adapter.", "head."


@dataclass(frozen=True)
class AdaptableAnalytic(Analytic):
    """Base of closed-form classifiers that can first adapt the network in the first task.

    With ``adapt=adapter`` clients train adapters in all blocks and a cosine head with a learnable
    scale. They train in the rounds of the first task, by cross-entropy over its classes. Then the
    server drops the head, and training ends. Statistics are collected under the adapted network, at
    the end of each task.
    """

    adapt: Literal["none", "adapter"] = option(
        "none",
        "adaptation of the network: none; adapter, adapters that clients train only in the first "
        "task",
    )
    bottleneck: int = option(64, "width of the adapters, with adapt=adapter", low=1)
    lr: float = option(
        0.2,
        "learning rate of adapters and head, SGD, cosine over the rounds, with adapt=adapter",
        low=0,
    )
    momentum: float = option(0.9, "momentum of SGD, with adapt=adapter", low=0, high=1)
    weight_decay: float = option(5e-4, "weight decay of SGD, with adapt=adapter", low=0)

    def training(self) -> Training:
        training = super().training()
        if self.adapt == "none":
            return training
        optim = Optim("sgd", self.lr, self.weight_decay, self.momentum, "cosine")
        optims = dict.fromkeys(ADAPTER_PREFIXES, optim)
        return replace(
            training,
            optims=optims,
            inputs=["images"],
            averaging="uniform",
            collect_at={"task_end"},
            active_prefixes=active_in_first_task,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        start = super().begin_task(state, task, backbone, rng)
        if state or self.adapt == "none":
            return start
        bound = backbone.dim**-0.5
        weight = torch.empty(task.size, backbone.dim).uniform_(-bound, bound, generator=rng)
        head = {"head.weight": weight, "head.scale": torch.ones(())}
        return {**start, **adapters(backbone.config, self.bottleneck, rng), **head}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        scores = cosines(self.features(backbone, train, batch), train["head.weight"])
        logits, labels = train["head.scale"] * scores, batch.y - ctx.task.start
        return batch.mean(F.cross_entropy(logits, labels, reduction="none")), {}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return super().update_from(phase, drop(state, "head."), sums, ctx)

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        if self.adapt == "none":
            return super().features(backbone, tree, batch)
        return backbone(batch.x, select(tree, "adapter."))


def adapters(config: ViTConfig, bottleneck: int, rng: torch.Generator) -> Tree:
    """Build adapters for every block that leave the network's outputs unchanged at first.

    Args:
        config: Architecture of the backbone, with embedding dimension D.
        bottleneck: Width r of an adapter.
        rng: Generator of the down-projections.

    Returns:
        For each block i ``adapter.{i}.down`` [r, D] from U(-1/sqrt D, 1/sqrt D). ``down_bias`` [r],
            ``up`` [D, r] and ``up_bias`` [D] are zero.
    """
    plugs: Tree = {}
    for i in range(config.depth):
        down = torch.empty(bottleneck, config.dim)
        plugs[f"adapter.{i}.down"] = down.uniform_(
            -(config.dim**-0.5), config.dim**-0.5, generator=rng
        )
        plugs[f"adapter.{i}.down_bias"] = torch.zeros(bottleneck)
        plugs[f"adapter.{i}.up"] = torch.zeros(config.dim, bottleneck)
        plugs[f"adapter.{i}.up_bias"] = torch.zeros(config.dim)
    return plugs


def active_in_first_task(task: Task, round: int) -> Collection[str]:
    """Return the prefixes of active tensors: adapters and head in the first task, then none.

    This is a function for ``Training.active_prefixes``.

    Args:
        task: The current task.
        round: Not used.

    Returns:
        ``ADAPTER_PREFIXES`` in the first task, an empty tuple in the others.
    """
    return () if task.index else ADAPTER_PREFIXES
