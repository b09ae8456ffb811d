"""Pieces of loss that several methods share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .core import Batch, Task, Tree


def linear_head(task: Task, dim: int, rng: torch.Generator) -> Tree:
    """A classification head for all classes of the run, PyTorch's default initialisation: U(-1/sqrt(D), 1/sqrt(D))."""
    bound = dim**-0.5
    return {
        "head.weight": torch.empty(task.classes, dim).uniform_(-bound, bound, generator=rng),
        "head.bias": torch.empty(task.classes).uniform_(-bound, bound, generator=rng),
    }


def head_logits(tree: Tree, features: Tensor) -> Tensor:
    """Logits [B, C] over all classes of the run."""
    return F.linear(features, tree["head.weight"], tree["head.bias"])


def task_cross_entropy(logits: Tensor, batch: Batch, task: Task) -> Tensor:
    """Cross-entropy over the current task's classes only; rows of other classes get exactly zero gradient."""
    return batch.mean(F.cross_entropy(logits[:, task.start : task.stop], batch.y - task.start, reduction="none"))


def nearest_mean(features: Tensor, means: Tensor, known: Tensor, distance: str) -> Tensor:
    """Scores [B, C]: minus the squared ``euclid`` distance to each class mean, or the ``cosine``; an unknown class is no answer."""
    cosine = distance == "cosine"
    score = F.normalize(features, dim=-1) @ F.normalize(means, dim=-1).mT if cosine else -(features[:, None] - means).square().sum(-1)
    return torch.where(known, score, torch.finfo(score.dtype).min)


def with_means(state: Tree, sums: Tree, task: Task) -> Tree:
    """``mean`` [C, D] and ``count`` [C] of a state, those of the task's classes replaced by what ``class_sums`` found."""
    mean, count = state["mean"].clone(), state["count"].clone()
    count[task.start : task.stop] = sums["class.count"]
    mean[task.start : task.stop] = sums["class.sum"] / sums["class.count"][:, None].clamp(min=1)
    return {"mean": mean, "count": count}


def class_sums(features: Tensor, batch: Batch, task: Task) -> Tree:
    """Count [c] and feature sum [c, D] of each class of the current task over the real samples."""
    hot = F.one_hot(batch.y - task.start, task.size).to(features.dtype) * batch.w[:, None]
    return {"class.count": hot.sum(0), "class.sum": hot.mT @ features.detach()}
