"""SS-IL in federated learning: Separated Softmax for Incremental Learning.

Ahn et al., ICCV 2021.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData, Task
from fczoo.functional.exemplars import Rehearsal, warn_once


@register_method("ssil")
@dataclass(frozen=True)
class SSIL(TunedLinearHead, Rehearsal):
    """Separated softmax over old or new classes, and a separate distillation of each old task.

    New images are classified among new classes, exemplars among old classes. Clients train and send
    the linear head and, depending on ``tune``, all weights or LoRA pairs. Exemplars stay at the
    client. Memory beyond the model: the teacher, one copy of the trained tensors; exemplars at the
    client.
    """

    title = "SS-IL"
    paper = 'Ahn et al., "SS-IL: Separated Softmax for Incremental Learning", ICCV 2021'
    formulas = r"""
    $$L = -\log \operatorname{softmax}_{c \in S(y)}(z)_y
    + T^2 \sum_{i<t} \operatorname{KL}(q_i \,\Vert\, p_i)$$

    $S(y)$ are the old classes for an exemplar, the new ones for a new image; $q_i$ and $p_i$ are
    softmaxes, over the classes of task $i$, of the last model's and this model's logits divided by
    $T$.
    """
    dataset_options = {"digits": {"memory": 20}}

    choice: Literal["herding", "raw", "residual", "first"] = option(
        "first",
        "choice of exemplars: herding, of normalised features; raw, herding of raw features; "
        "residual, the largest inner product with w, where w starts as the class mean and grows by "
        "mean minus chosen feature after each choice; first, first images of each class "
        "(released code)",
    )
    temperature: float = option(
        2.0, "temperature T of both softmaxes; the distillation is multiplied by T^2", low=1e-6
    )
    ratio: float = option(
        4.0,
        "repeat exemplars until there are at most this many new images per exemplar; 0: no "
        "repetition",
        low=0,
    )

    def training(self) -> Training:
        # Fixed ratio of new images to exemplars, which are repeated as needed. Released code:
        # batches of 128 new images and 32 exemplars.
        def with_repeats(data: LocalData, kept: Tensor) -> Tensor:
            times = (
                math.ceil(len(data.index) / self.ratio / len(kept))
                if len(kept) and self.ratio
                else 1
            )
            number = (
                max(round(len(data.index) / self.ratio), len(kept)) if self.ratio else len(kept)
            )
            return torch.cat([data.index, kept.repeat(max(times, 1))[:number]])

        return replace(self.rehearsing(super().training()), trains_on=with_repeats)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if task.size == 1:
            warn_once(
                f"{self.name} does not learn task {task.index + 1}: a softmax over one class is "
                "always 1"
            )
        # Task boundary: the teacher is the last global model. Row i of ``groups`` marks the classes
        # of task i.
        new = torch.zeros(1, task.classes)
        new[0, task.start : task.stop] = 1
        state = {"groups": new[:0], **super().begin_task(state, task, backbone, rng)}
        state = self.with_teacher(state, task)
        return {**state, "groups": torch.cat([state["groups"], new.to(state["groups"])])}

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # Logits of the last model, for the task-wise distillation.
        return self.earlier_logits("teacher.", backbone, shared, batch)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Separated softmax: cross-entropy over the old classes for exemplars, over the new ones for
        # new images; mean over the mixed batch.
        logits, old, classes = self.logits(backbone, train, batch), ctx.task.start, ctx.task.stop
        loss = batch.mean(self.separated_loss(logits[:, :classes], batch.y, old))
        # Task-wise distillation: T^2 sum_i KL(q_i || p_i) over finished tasks i, on all images.
        if old:
            groups = ctx.shared["groups"][:-1, :old]
            loss = loss + batch.mean(
                self.task_distillation(logits[:, :old], batch.teacher[:, :old], groups)
            )
        return loss, {}

    def separated_loss(self, logits: Tensor, labels: Tensor, old: int) -> Tensor:
        """Compute the cross-entropy of each image over S(y), the old or the new classes.

        Args:
            logits: Logits [B, C] over the classes seen.
            labels: Labels [B].
            old: Number of old classes; these are the first ones.

        Returns:
            Losses [B].
        """
        is_old = torch.arange(logits.shape[1], device=logits.device) < old
        same_side = is_old == (labels < old)[:, None]
        side_logits = logits.masked_fill(~same_side, torch.finfo(logits.dtype).min)
        return F.cross_entropy(side_logits, labels, reduction="none")

    def task_distillation(self, logits: Tensor, teacher: Tensor, groups: Tensor) -> Tensor:
        """Compute T^2 sum_i KL(q_i || p_i), with softmaxes over the classes of finished task i.

        Args:
            logits: Logits [B, o] over the old classes.
            teacher: Logits [B, o] of the teacher.
            groups: 1 for the classes of each finished task [t, o].

        Returns:
            Losses [B].
        """
        outside = groups[:, None] == 0  # [t, 1, o]
        lowest = torch.finfo(logits.dtype).min
        log_p, log_q = (
            (z / self.temperature)[None].masked_fill(outside, lowest).log_softmax(-1)
            for z in (logits, teacher)
        )
        divergence = (log_q.exp() * (log_q - log_p)).masked_fill(outside, 0.0)
        return self.temperature**2 * divergence.sum((0, 2))
