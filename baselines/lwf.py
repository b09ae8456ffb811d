"""LwF in federated learning: Learning without Forgetting. Li and Hoiem, ECCV 2016."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.losses import distillation, task_cross_entropy


@register_method("lwf")
@dataclass(frozen=True)
class LwF(TunedLinearHead):
    """FedAvg with distillation of the last task's global model over the old classes.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    Memory beyond the model: the teacher, one copy of the trained tensors, which the server sends to
    each client once per task.
    """

    paper = 'Li and Hoiem, "Learning without Forgetting", ECCV 2016'
    formulas = r"""
    $$L = L_{ce} - \lambda \sum_{c < C} q_c \log p_c$$

    $$q = \operatorname{softmax}(z_{old} / \tau)$$

    $$p = \operatorname{softmax}(z / \tau)$$

    The sum is over the old classes; $z_{old}$ are the logits of the last task's global model.
    """

    strength: float = option(
        1.0,
        "lambda, weight of the distillation (1: paper; 0.5: HGP's code)",
        low=0,
        tune=(1e-2, 10.0, "log"),
    )
    temperature: float = option(
        2.0, "temperature tau of both softmaxes; the loss has no factor tau^2", low=1e-6
    )
    distill_current: bool = option(
        False,
        "distil the logits of the current task's classes, on which the teacher was not trained, "
        "instead of the old classes'",
        quirk="fed-mammoth",
    )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the teacher is the final global model of the last task.
        return self.with_teacher(super().begin_task(state, task, backbone, rng), task)

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # z_old: the teacher's logits on the view that the student sees.
        return self.earlier_logits("teacher.", backbone, shared, batch)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_ce + lambda KD; the first task has only L_ce.
        logits = self.logits(backbone, train, batch)
        loss = task_cross_entropy(logits, batch, ctx.task)
        if ctx.task.index:
            loss = loss + self.strength * self.distillation(logits, batch, ctx.task)
        return loss, {}

    def distillation(self, logits: Tensor, batch: Batch, task: Task) -> Tensor:
        """Compute KD: -sum_c q_c log p_c over the old classes, mean over images.

        Args:
            logits: Logits [B, C] of the student; p is their softmax at temperature tau.
            batch: Weights and the teacher's logits; q is their softmax at temperature tau.
            task: The current task.

        Returns:
            The mean loss of the batch.
        """
        # fed-mammoth distils the current classes, whose head rows the teacher has never trained.
        classes = slice(task.start, task.stop) if self.distill_current else slice(0, task.start)
        per_image = distillation(logits[:, classes], batch.teacher[:, classes], self.temperature)
        return batch.mean(per_image)
