"""Joint training on the images of all tasks so far: the upper bound."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_seen_class
from fczoo.core.registry import register_method
from fczoo.core.training import Scope, TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task


@register_method("joint")
@dataclass(frozen=True)
class Joint(TunedLinearHead):
    """Upper bound: each task trains from the pre-trained weights on the images of all tasks so far.

    Its accuracy is free of forgetting; after the last task it is the usual joint upper bound.
    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    """

    paper = "upper bound of HGP (central) and PILoRA (federated)"
    formulas = r"""
    $$L = -\log \operatorname{softmax}_{c \in C_1 \cup \dots \cup C_t}\bigl( h(f(x)) \bigr)_y, \quad
    x \in D_1 \cup \dots \cup D_t$$
    """
    supports_recurring_classes = True

    setting: Literal["central", "federated"] = option(
        "central",
        "where the images of all tasks are: central, in one place (HGP); federated, at their "
        "clients (PILoRA)",
    )

    def training(self) -> Training:
        # HGP's upper bound is central: all images are in one place. PILoRA's is federated.
        scope: Scope = "pooled" if self.setting == "central" else "seen"
        training, where = super().training(), ", in one place" if scope == "pooled" else ""
        uploads = {p: per_seen_class(*group.statistics) for p, group in training.uploads.items()}
        note = f"upper bound: keeps the images of all tasks{where}"
        return replace(training, data_scope=scope, uploads=uploads, table_note=note)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: training restarts from the pre-trained weights.
        return super().begin_task({}, task, backbone, rng)

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # ``head_init=means`` covers all classes seen, as the head is initialised again.
        ctx = replace(ctx, task=_all_so_far(ctx.task))
        return super().collect(phase, backbone, tree, batch, ctx)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return super().update_from(phase, state, sums, replace(ctx, task=_all_so_far(ctx.task)))

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_ce over all classes seen, on the images of all tasks so far.
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}


def _all_so_far(task: Task) -> Task:
    """Return the task with all classes seen so far, for which the head is initialised again."""
    return replace(task, start=0)
