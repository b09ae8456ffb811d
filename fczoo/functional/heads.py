"""Classification heads: a linear layer, or class means."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, select
from fczoo.core.types import Task


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


def nearest_mean(features: Tensor, means: Tensor, known: Tensor, distance: str) -> Tensor:
    """Scores [B, C]: minus the squared ``euclid`` distance to each class mean, or the ``cosine``; an unknown class is no answer."""
    cosine = distance == "cosine"
    score = (
        F.normalize(features, dim=-1) @ F.normalize(means, dim=-1).mT
        if cosine
        else -(features[:, None] - means).square().sum(-1)
    )
    return torch.where(known, score, torch.finfo(score.dtype).min)


def with_means(state: Tree, sums: Tree, task: Task) -> Tree:
    """``mean`` [C, D] and ``count`` [C] of a state, those of the task's classes replaced by what ``class_sums`` found."""
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
    """The head after ``epochs`` of SGD with momentum 0.9, each on fresh draws; rows outside ``classes`` keep their values."""
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
