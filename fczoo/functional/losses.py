"""Losses shared by several methods."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.types import Batch, Task


def task_cross_entropy(
    logits: Tensor, batch: Batch, task: Task, support: Literal["task", "seen", "all"] = "task"
) -> Tensor:
    """Compute the cross-entropy over the current task's classes, or over more of them.

    Rows of classes outside the support get exactly zero gradient.

    Args:
        logits: Logits [B, C].
        batch: Labels and weights of the images.
        task: The current task.
        support: Classes in the softmax: the current task's, all seen so far, or all of the run.

    Returns:
        The mean loss of the batch.
    """
    first = task.start if support == "task" else 0
    last = task.classes if support == "all" else task.stop
    return batch.mean(F.cross_entropy(logits[:, first:last], batch.y - first, reduction="none"))


def teacher_binary_cross_entropy(logits: Tensor, batch: Batch, old: int) -> Tensor:
    """Compute the binary cross-entropy with a teacher, averaged over images and classes.

    The targets of old classes are the teacher's sigmoids; those of the other classes are the
    labels.

    Args:
        logits: Logits [B, C].
        batch: Labels, weights and logits of the teacher.
        old: Number of old classes; these are the first ones.

    Returns:
        The mean loss of the batch.
    """
    hot = F.one_hot(batch.y, logits.shape[1])[:, old:].to(logits)
    target = torch.cat([batch.teacher[:, :old].sigmoid(), hot], 1) if old else hot
    return batch.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1))


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute the distillation loss -sum_c q_c log p_c of each image.

    q is the softmax of the teacher's logits, p that of ``logits``. Both are divided by the
    temperature; the result is not multiplied by its square.

    Args:
        logits: Logits [B, C].
        teacher: Logits of the teacher [B, C].
        temperature: Temperature of both softmaxes.

    Returns:
        Losses [B].
    """
    target = (teacher / temperature).softmax(-1)
    return -(target * (logits / temperature).log_softmax(-1)).sum(-1)


def cross_entropy_by_task_norm(
    logits: Tensor, labels: Tensor, sizes: Sequence[int], temperature: float
) -> Tensor:
    """Compute the cross-entropy of logits divided by the mean of their norms over the tasks.

    SLCA (Zhang et al., ICCV 2023): no task gains an advantage by the size of its logits.

    Args:
        logits: Logits [B, C].
        labels: Labels [B].
        sizes: Number of classes of each task.
        temperature: Temperature of the softmax.

    Returns:
        The mean loss.
    """
    norms = [
        torch.linalg.vector_norm(part, dim=1, keepdim=True) + 1e-7
        for part in logits.split(sizes, 1)
    ]
    return F.cross_entropy(logits / torch.stack(norms).mean(0) / temperature, labels)


def normalised_cross_entropy(logits: Tensor, labels: Tensor, temperature: float | None) -> Tensor:
    """Compute the cross-entropy of logits scaled to norm 1 / ``temperature``.

    Args:
        logits: Logits [B, C].
        labels: Labels [B].
        temperature: Temperature; None: the logits are not scaled.

    Returns:
        The mean loss.
    """
    if temperature is not None:
        logits = (
            logits / (torch.linalg.vector_norm(logits, dim=1, keepdim=True) + 1e-12) / temperature
        )
    return F.cross_entropy(logits, labels)
