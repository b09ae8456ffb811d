"""Losses that several methods share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.types import Batch, Task


def task_cross_entropy(logits: Tensor, batch: Batch, task: Task) -> Tensor:
    """Cross-entropy over the current task's classes only; rows of other classes get exactly zero gradient."""
    logits = logits[:, task.start : task.stop]
    return batch.mean(F.cross_entropy(logits, batch.y - task.start, reduction="none"))


def normalised_cross_entropy(logits: Tensor, labels: Tensor, temperature: float | None) -> Tensor:
    """Cross-entropy of logits [B, C], scaled to norm 1 / ``temperature`` unless that is None."""
    if temperature is not None:
        logits = logits / (torch.linalg.vector_norm(logits, dim=1, keepdim=True) + 1e-12) / temperature
    return F.cross_entropy(logits, labels)
