"""Losses that several methods share."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.types import Batch, Task


def task_cross_entropy(logits: Tensor, batch: Batch, task: Task) -> Tensor:
    """Cross-entropy over the current task's classes only; rows of other classes get exactly zero gradient."""
    logits = logits[:, task.start : task.stop]
    return batch.mean(F.cross_entropy(logits, batch.y - task.start, reduction="none"))


def taught_binary_cross_entropy(logits: Tensor, batch: Batch, old: int) -> Tensor:
    """Binary cross-entropy of logits [B, C], mean over images and classes.

    The teacher's sigmoids are the targets of the first ``old`` classes, the labels those of the others.
    """
    hot = F.one_hot(batch.y, logits.shape[1])[:, old:].to(logits)
    target = torch.cat([batch.teacher[:, :old].sigmoid(), hot], 1) if old else hot
    return batch.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1))


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-sum_c q_c log p_c [B]: q the softmax of the teacher's logits [B, C], p that of ``logits``.

    Both are divided by the temperature; the result is not multiplied by its square.
    """
    target = (teacher / temperature).softmax(-1)
    return -(target * (logits / temperature).log_softmax(-1)).sum(-1)


def cross_entropy_by_task_norm(
    logits: Tensor, labels: Tensor, sizes: Sequence[int], temperature: float
) -> Tensor:
    """Cross-entropy of logits [B, C] over the mean of their norms over the tasks, of ``sizes`` classes each.

    SLCA (Zhang et al., ICCV 2023): no task gets ahead by the size of its logits.
    """
    norms = [torch.linalg.vector_norm(part, dim=1, keepdim=True) + 1e-7 for part in logits.split(sizes, 1)]
    return F.cross_entropy(logits / torch.stack(norms).mean(0) / temperature, labels)


def normalised_cross_entropy(logits: Tensor, labels: Tensor, temperature: float | None) -> Tensor:
    """Cross-entropy of logits [B, C], scaled to norm 1 / ``temperature`` unless that is None."""
    if temperature is not None:
        logits = logits / (torch.linalg.vector_norm(logits, dim=1, keepdim=True) + 1e-12) / temperature
    return F.cross_entropy(logits, labels)
