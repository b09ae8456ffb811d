"""Classification heads: a linear layer, or class means."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, select
from fczoo.core.types import Task


def linear_head(task: Task, dim: int, rng: torch.Generator) -> Tree:
    """``head.weight`` [C, D] and ``head.bias`` [C] for all classes of the run.

    Initialised as PyTorch does, U(-1/sqrt(D), 1/sqrt(D)).
    """
    bound = dim**-0.5
    return {
        "head.weight": torch.empty(task.classes, dim).uniform_(-bound, bound, generator=rng),
        "head.bias": torch.empty(task.classes).uniform_(-bound, bound, generator=rng),
    }


def head_logits(tree: Tree, features: Tensor) -> Tensor:
    """Logits [B, C] over all classes of the run."""
    return F.linear(features, tree["head.weight"], tree["head.bias"])


def nearest_mean(features: Tensor, means: Tensor, has_mean: Tensor, distance: str) -> Tensor:
    """Scores [B, C] of features [B, D] by class means [C, D].

    ``distance`` is ``cosine`` similarity or ``euclid``, minus the squared distance. Classes where
    ``has_mean`` [C] is false get the lowest number, so that they are never predicted.
    """
    if distance == "cosine":
        score = F.normalize(features, dim=-1) @ F.normalize(means, dim=-1).mT
    else:
        score = -(features[:, None] - means).square().sum(-1)
    return torch.where(has_mean, score, torch.finfo(score.dtype).min)


def with_means(state: Tree, sums: Tree, task: Task) -> Tree:
    """A state's ``mean`` [C, D] and ``count`` [C], with the current task's classes from ``class_sums``."""
    mean, count = state["mean"].clone(), state["count"].clone()
    count[task.start : task.stop] = sums["class.count"]
    mean[task.start : task.stop] = sums["class.sum"] / sums["class.count"][:, None].clamp(min=1)
    return {"mean": mean, "count": count}


def train_head(
    head: Tree,
    classes: tuple[int, int],
    draw: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    lr: float,
    batch_size: int,
    cosine: bool = True,
) -> Tree:
    """The head after ``epochs`` of SGD with momentum 0.9, each on the features and labels of a new ``draw``.

    ``loss(logits, labels)`` sees the logits of ``classes`` (first, one past the last) and labels counted
    from the first; rows of other classes keep their values. ``cosine`` lowers the rate over the epochs.
    """
    first, last = classes
    head = {k: v.clone().requires_grad_() for k, v in select(head, "head.").items()}
    optimizer = torch.optim.SGD(head.values(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        x, y = draw()
        for i, j in zip(x.split(batch_size), y.split(batch_size), strict=True):
            optimizer.zero_grad()
            loss(head_logits(head, i)[:, first:last], j - first).backward()
            optimizer.step()
        if cosine:
            schedule.step()
    return {k: v.detach() for k, v in head.items()}
