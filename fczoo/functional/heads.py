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
from fczoo.core.payload import per_class
from fczoo.core.training import Optim, OptimizerName, TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums


@dataclass(frozen=True)
class OptimizerOptions(Method):
    """Base of methods whose user chooses the optimizer of the trained tensors."""

    optimizer: OptimizerName = option("adam", "optimizer of the tensors that clients train")
    momentum: float = option(0.0, "momentum, only with optimizer=sgd", low=0, high=1)
    weight_decay: float = option(0.0, "weight decay of the tensors that clients train", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.optimizer != "sgd":
            raise FczooError(
                f"{self.name}.momentum is only for {self.name}.optimizer=sgd; leave out the "
                f"momentum, or use sgd instead of {self.optimizer}"
            )

    def optim(self, lr: float, schedule: str = "constant") -> Optim:
        """Return the settings of the chosen optimizer.

        Args:
            lr: Learning rate.
            schedule: Schedule of the learning rate over the rounds.

        Returns:
            Optimizer, learning rate, weight decay, momentum and schedule.
        """
        return Optim(self.optimizer, lr, self.weight_decay, self.momentum, schedule)


@dataclass(frozen=True)
class LinearHead(OptimizerOptions):
    """Base of methods with a linear head over all classes of the run, and of its initial values.

    A loss over the current task's classes gives no gradient to the mean over that task's rows. So a
    random initial value of this mean stays: an offset between tasks that carries no information
    about the images and hides the quality of the features. Protocols of papers use random initial
    values, because released code does.
    """

    head_init: Literal["default", "normal", "zeros", "means"] = option(
        "zeros",
        "initial head rows: default, PyTorch's U(-1/sqrt(D), 1/sqrt(D)) (released code); normal, "
        "N(0, 0.02^2), bias 0 (timm, fed-mammoth); zeros; means, normalised class means at a "
        "task's start (HeadTune, Legate et al., 2023)",
    )

    @abstractmethod
    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the input of the head.

        Args:
            backbone: The frozen backbone.
            tree: State or trained tensors of the model.
            batch: Images.

        Returns:
            Features [B, D].
        """

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the input of the head during training, if a method uses a different one there.

        Args:
            backbone: The frozen backbone.
            tree: State or trained tensors of the model.
            batch: Images.

        Returns:
            Features [B, D]; by default those of ``features``.
        """
        return self.features(backbone, tree, batch)

    def start_head(self, task: Task, dim: int, rng: torch.Generator) -> Tree:
        """Create the head at the start of a run.

        With ``head_init=means`` the statistics at the start of each task set its rows later.

        Args:
            task: The first task.
            dim: Feature dimension D.
            rng: Random generator.

        Returns:
            ``head.weight`` [C, D] and ``head.bias`` [C].
        """
        head = linear_head(task, dim, rng if self.head_init == "default" else None)
        if self.head_init == "normal":
            torch.nn.init.trunc_normal_(head["head.weight"], std=0.02, generator=rng)
        return head

    def with_head_means(self, training: Training) -> Training:
        """Return the method's declaration; with ``head_init=means`` also that of the class means.

        Args:
            training: Declaration without the class means.
        """
        if self.head_init != "means":
            return training
        return replace(
            training,
            uploads={**training.uploads, "class.": per_class("count", "sum")},
            collect_at={*training.collect_at, "task_start"},
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        return class_sums(self.trained_features(backbone, tree, batch), batch, ctx.task)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Set the new classes' rows to their mean features of length 1, with bias 0.

        Rows of classes without images do not change. If labels return in later tasks, rows that
        have been trained do not change either.

        Args:
            phase: Phase in which the statistics were collected.
            state: Current state.
            sums: ``class.count`` [c] and ``class.sum`` [c, D].
            ctx: Server context.

        Returns:
            The state with the new ``head.weight``.
        """
        weight, new = state["head.weight"].clone(), slice(ctx.task.start, ctx.task.stop)
        means = F.normalize(sums["class.sum"], dim=-1)
        present = sums["class.count"] > 0
        if ctx.task.returning:
            present &= (weight[new] == 0).all(1)
        weight[new][present] = means[present].to(weight)
        return {**state, "head.weight": weight}


@dataclass(frozen=True)
class PromptedHead(LinearHead):
    """Base of methods that train prompts and a linear head, with separate learning rates."""

    head_lr: float | None = option(
        None, "learning rate of the head; none: lr", low=0, tune=(1e-4, 1e-1, "log")
    )

    def optims(self, prompts: Optim, *prefixes: str) -> dict[str, Optim]:
        """Return the optimizers for ``Training.optims``.

        Args:
            prompts: Optimizer of the prompts.
            *prefixes: Prefixes of the tensors that it trains.

        Returns:
            Optimizer by prefix; the head has ``head_lr`` if that is set.
        """
        head = prompts if self.head_lr is None else replace(prompts, lr=self.head_lr)
        return {**dict.fromkeys(prefixes, prompts), "head.": head}


def linear_head(task: Task, dim: int, rng: torch.Generator | None) -> Tree:
    """Create a linear head for all classes of the run.

    Args:
        task: A task of the run, which knows the number of classes C.
        dim: Feature dimension D.
        rng: Generator of U(-1/sqrt(D), 1/sqrt(D)), PyTorch's initialisation; None: zeros.

    Returns:
        ``head.weight`` [C, D] and ``head.bias`` [C].
    """
    if rng is None:
        return {
            "head.weight": torch.zeros(task.classes, dim),
            "head.bias": torch.zeros(task.classes),
        }
    bound = dim**-0.5
    return {
        "head.weight": torch.empty(task.classes, dim).uniform_(-bound, bound, generator=rng),
        "head.bias": torch.empty(task.classes).uniform_(-bound, bound, generator=rng),
    }


def head_logits(tree: Tree, features: Tensor) -> Tensor:
    """Compute logits over all classes of the run.

    Args:
        tree: Tree with ``head.weight`` [C, D] and ``head.bias`` [C].
        features: Features [B, D].

    Returns:
        Logits [B, C].
    """
    return F.linear(features, tree["head.weight"], tree["head.bias"])


def merge_task_rows(state: Tree, merged: Tree, task: Task) -> Tree:
    """Return the head with merged rows for the task's classes only.

    Args:
        state: State before the merge; the rows of all other classes come from it.
        merged: Merged tensors of the clients.
        task: The current task.

    Returns:
        The tensors of the head.
    """
    head: Tree = {}
    for name, value in select(state, "head.").items():
        head[name] = value.clone()
        head[name][task.start : task.stop] = merged[name][task.start : task.stop].to(value)
    return head


def nearest_mean(features: Tensor, means: Tensor, has_mean: Tensor, distance: str) -> Tensor:
    """Score features by their similarity to class means.

    Args:
        features: Features [B, D].
        means: Class means [C, D].
        has_mean: Whether each class has a mean [C].
        distance: ``cosine`` for cosine similarity, ``euclid`` for minus the squared distance.

    Returns:
        Scores [B, C]. Classes without a mean get the lowest number, so that they are never
            predicted.
    """
    score = (
        cosines(features, means)
        if distance == "cosine"
        else -(features[:, None] - means).square().sum(-1)
    )
    return torch.where(has_mean, score, torch.finfo(score.dtype).min)


def update_means(state: Tree, sums: Tree, task: Task) -> Tree:
    """Update the class means of a state with the ``class_sums`` of the current task.

    Args:
        state: State with ``mean`` [C, D] and ``count`` [C].
        sums: ``class.count`` [c] and ``class.sum`` [c, D] of the current task.
        task: The current task.

    Returns:
        The new ``mean`` and ``count``.
    """
    mean, count, new = state["mean"].clone(), state["count"].clone(), slice(task.start, task.stop)
    total = mean[new] * count[new][:, None] + sums["class.sum"]  # labels may recur
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
    """Train the head by SGD with momentum 0.9, on new features in each epoch.

    Args:
        head: Tree with ``head.weight`` [C, D] and ``head.bias`` [C].
        classes: First class and one past the last. Rows of other classes keep their values.
        draw: Function that returns the features [n, D] and labels [n] of an epoch.
        loss: Function of the logits of ``classes`` and the labels, counted from the first class.
        epochs: Number of epochs.
        lr: Learning rate.
        batch_size: Features per step.
        cosine: Lower the learning rate over the epochs by a cosine schedule.
        weight_decay: Weight decay.

    Returns:
        The trained head.
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
    """Fit the head to features by Adam and cross-entropy, shuffled in each epoch.

    Args:
        head: Tree with ``head.weight`` [C, D] and ``head.bias`` [C].
        x: Features [n, D].
        y: Labels [n]. The loss covers these classes; rows of other classes keep their values.
        epochs: Number of epochs.
        lr: Learning rate.
        batch_size: Features per step.
        rng: Generator of the order.

    Returns:
        The fitted head.
    """
    classes, target = y.unique(return_inverse=True)
    head = {k: v.clone().requires_grad_() for k, v in select(head, "head.").items()}
    optimizer = torch.optim.Adam(head.values(), lr)
    for _ in range(epochs):
        for indices in torch.randperm(len(y), generator=rng, device=rng.device).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(head_logits(head, x[indices])[:, classes], target[indices]).backward()
            optimizer.step()
    return {k: v.detach() for k, v in head.items()}
