"""Classification heads: a linear layer, or class means."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.payload import Uploads, per_class
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Moment, Optim, OptimizerName, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums


@dataclass(frozen=True)
class Optimised(Method):
    """Base of methods whose user chooses the optimizer of what clients train."""

    optimizer: OptimizerName = option("adam", "optimizer of all that clients train")
    momentum: float = option(0.0, "momentum of sgd; the others have their own", low=0, high=1)
    weight_decay: float = option(0.0, "weight decay of all that clients train", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.optimizer != "sgd":
            raise FczooError(
                f"{self.name}.momentum is for {self.name}.optimizer=sgd, {self.optimizer} has its own; set "
                "one or the other"
            )

    def optim(self, lr: float, schedule: str = "constant") -> Optim:
        """How tensors are trained at this rate, by the method's optimizer."""
        return Optim(self.optimizer, lr, self.weight_decay, self.momentum, schedule)


@dataclass(frozen=True)
class LinearHead(Optimised):
    """Base of methods with a linear head over all classes of the run: it decides where the head starts.

    A loss over the current task's classes gives the mean over that task's rows no gradient, so what a random
    start puts there stays: offsets between tasks that say nothing about the images. Such a start hides what
    the features can do; papers' protocols have it, because released code does.
    """

    head_init: Literal["default", "zeros", "means"] = option(
        "zeros",
        "head rows start as PyTorch's linear layers do, U(-1/sqrt D, 1/sqrt D) (released code); at zero; or, "
        "as a task begins, at its classes' mean features, of length 1 (HeadTune, Legate et al., 2023)",
    )

    @abstractmethod
    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """What the head reads, [B, D], with the trained tensors of ``tree``."""

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """What the head reads in training, [B, D], of a method in which that is something else."""
        return self.features(backbone, tree, batch)

    def start_head(self, task: Task, dim: int, rng: torch.Generator) -> Tree:
        """The head as a run starts; ``means`` are put in by the survey."""
        return linear_head(task, dim, rng if self.head_init == "default" else None)

    def head_uploads(self) -> Uploads:
        """What the survey sends, for ``Training.uploads``."""
        return {"class.": per_class("count", "sum")} if self.head_init == "means" else {}

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"}) if self.head_init == "means" else frozenset()

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return class_sums(self.trained_features(backbone, state, batch), batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """The new classes' rows at their means, bias 0.

        Rows of classes that nobody holds stay and, where labels come back, rows that have been trained.
        """
        weight, new = state["head.weight"].clone(), slice(ctx.task.start, ctx.task.stop)
        means = F.normalize(sums["class.sum"], dim=-1)
        held = sums["class.count"] > 0
        if ctx.task.returning:
            held &= (weight[new] == 0).all(1)
        weight[new][held] = means[held].to(weight)
        return {**state, "head.weight": weight}


@dataclass(frozen=True)
class PromptedHead(LinearHead):
    """Base of methods that train prompts and a linear head, each at a learning rate of its own."""

    head_lr: float | None = option(
        None, "learning rate of the head; none: that of the prompts", low=0, tune=(1e-4, 1e-1, "log")
    )

    def optims(self, prompts: Optim, *prefixes: str) -> dict[str, Optim]:
        """``Training.optims``: ``prompts`` for tensors with these prefixes, the head with its own rate."""
        head = prompts if self.head_lr is None else replace(prompts, lr=self.head_lr)
        return {**dict.fromkeys(prefixes, prompts), "head.": head}


def linear_head(task: Task, dim: int, rng: torch.Generator | None) -> Tree:
    """``head.weight`` [C, D] and ``head.bias`` [C] for all classes of the run.

    Initialised as PyTorch does, U(-1/sqrt(D), 1/sqrt(D)); zero without ``rng``.
    """
    if rng is None:
        return {"head.weight": torch.zeros(task.classes, dim), "head.bias": torch.zeros(task.classes)}
    bound = dim**-0.5
    return {
        "head.weight": torch.empty(task.classes, dim).uniform_(-bound, bound, generator=rng),
        "head.bias": torch.empty(task.classes).uniform_(-bound, bound, generator=rng),
    }


def head_logits(tree: Tree, features: Tensor) -> Tensor:
    """Logits [B, C] over all classes of the run."""
    return F.linear(features, tree["head.weight"], tree["head.bias"])


def kept_rows(state: Tree, merged: Tree, task: Task) -> Tree:
    """The head with the merged rows of the task's classes and all other rows as the state has them."""
    head: Tree = {}
    for name, value in select(state, "head.").items():
        head[name] = value.clone()
        head[name][task.start : task.stop] = merged[name][task.start : task.stop].to(value)
    return head


def nearest_mean(features: Tensor, means: Tensor, has_mean: Tensor, distance: str) -> Tensor:
    """Scores [B, C] of features [B, D] by class means [C, D].

    ``distance`` is ``cosine`` similarity or ``euclid``, minus the squared distance. Classes where
    ``has_mean`` [C] is false get the lowest number, so that they are never predicted.
    """
    if distance == "cosine":
        score = cosines(features, means)
    else:
        score = -(features[:, None] - means).square().sum(-1)
    return torch.where(has_mean, score, torch.finfo(score.dtype).min)


def with_means(state: Tree, sums: Tree, task: Task) -> Tree:
    """A state's ``mean`` [C, D] and ``count`` [C], the current task's ``class_sums`` added to its classes."""
    mean, count, new = state["mean"].clone(), state["count"].clone(), slice(task.start, task.stop)
    total = mean[new] * count[new][:, None] + sums["class.sum"]  # labels may come back
    count[new] += sums["class.count"]
    mean[new] = (total / count[new][:, None].clamp(min=1)).to(mean)
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
    weight_decay: float = 0.0,
) -> Tree:
    """The head after ``epochs`` of SGD with momentum 0.9, each on the features and labels of a new ``draw``.

    ``loss(logits, labels)`` sees the logits of ``classes`` (first, one past the last) and labels counted
    from the first; rows of other classes keep their values. ``cosine`` lowers the rate over the epochs.
    """
    first, last = classes
    head = {k: v.clone().requires_grad_() for k, v in select(head, "head.").items()}
    optimizer = torch.optim.SGD(head.values(), lr, momentum=0.9, weight_decay=weight_decay)
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


def fit_head(
    head: Tree, x: Tensor, y: Tensor, epochs: int, lr: float, batch_size: int, rng: torch.Generator
) -> Tree:
    """The head after ``epochs`` of Adam over features ``x`` [n, D] and labels ``y`` [n], shuffled each time.

    Cross-entropy over the classes that have a feature; rows of the others keep their values.
    """
    classes, target = y.unique(return_inverse=True)
    head = {k: v.clone().requires_grad_() for k, v in select(head, "head.").items()}
    optimizer = torch.optim.Adam(head.values(), lr)
    for _ in range(epochs):
        for drawn in torch.randperm(len(y), generator=rng, device=rng.device).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head_logits(head, x[drawn])[:, classes], target[drawn]).backward()
            optimizer.step()
    return {k: v.detach() for k, v in head.items()}
