"""Prototype head: predict the nearest learned prototype (PILoRA, Guo et al., ECCV 2024)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.training import TaskPhase
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import class_sums


@dataclass(frozen=True)
class LearnedPrototypes(Method):
    """Base of methods with learned class prototypes; those of finished tasks are frozen.

    The state holds ``prototype`` [c, D] for the classes of the current task, ``frozen.before`` for
    earlier classes and ``frozen.after`` for later ones.
    """

    lr_prototype: float = option(
        2e-2, "learning rate of the prototypes", low=0, tune=(1e-3, 1.0, "log")
    )
    pull: float = option(
        1e-3,
        "lambda, weight of the distance between a feature and the prototype of its class",
        low=0,
    )
    sharpness: float = option(1.0, "delta, factor on the distances in the softmax", low=0)
    distance: Literal["rms", "squared"] = option(
        "rms",
        "distance to prototypes: rms, root mean square (released code); squared, squared L2 "
        "(paper); learning rates are tuned for rms",
    )
    support: Literal["all", "seen", "task"] = option(
        "all",
        "classes in the training softmax: all, every class of the run (paper and code); seen, "
        "those of the tasks so far; task, those of the current task",
    )
    head_tune: bool = option(
        False,
        "initialise new prototypes with the class means of the frozen features (FedNCM's HeadTune)",
        tune=[False, True],
    )

    def start_prototypes(self, state: Tree, task: Task, dim: int, rng: torch.Generator) -> Tree:
        """Return all prototypes at the start of a task.

        Args:
            state: State after the previous task; empty at the start of a run.
            task: The task that starts.
            dim: Feature dimension D.
            rng: Generator of the initial prototypes N(0, 0.1^2), at the start of a run.

        Returns:
            ``frozen.before``, ``prototype`` and ``frozen.after``.
        """
        # Only prototypes of the new classes are trained. All others keep their values: old ones the
        # last global value, future ones the initial draw.
        table = self.table(state) if state else 0.1 * torch.randn(task.classes, dim, generator=rng)
        frozen = {"frozen.before": table[: task.start], "frozen.after": table[task.stop :]}
        return {**frozen, "prototype": table[task.start : task.stop].clone()}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # HeadTune (FedNCM), before the first round: sums of the frozen features of each new class.
        return class_sums(batch.query, batch, ctx.task)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # HeadTune: new prototypes start at the global class means; a class without images keeps its
        # initial draw.
        count = sums["class.count"][:, None]
        mean = sums["class.sum"] / count.clamp(min=1)
        return {**state, "prototype": torch.where(count > 0, mean, state["prototype"])}

    def prototype_loss(self, features: Tensor, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Compute l_dce (eq. 8) + lambda l_pl (eq. 9), mean over the batch.

        l_dce is the distance-based cross-entropy, l_pl the distance to the true prototype.

        Args:
            features: Features [B, D].
            train: Tensors that the client trains.
            batch: Labels and weights of the images.
            ctx: Broadcast tensors and the current task.

        Returns:
            The mean loss of the batch.
        """
        distance = self.distances(features, self.table({**ctx.shared, **train}))
        first = ctx.task.start if self.support == "task" else 0
        last = ctx.task.classes if self.support == "all" else ctx.task.stop
        # l_dce: softmax over classes of -delta d(x, c).
        logits = -self.sharpness * distance[:, first:last]
        entropy = F.cross_entropy(logits, batch.y - first, reduction="none")
        # l_pl: d(x, y).
        return batch.mean(entropy + self.pull * distance.gather(1, batch.y[:, None])[:, 0])

    def distances(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Compute distances d(x, c) of features to prototypes.

        ``rms``: sqrt(|f - m_c|^2 / D), as in the released code. ``squared``: |f - m_c|^2, as in
        eq. 8.

        Args:
            features: Features f [B, D].
            prototypes: Prototypes m [C, D].

        Returns:
            Distances [B, C].
        """
        gap = (features[:, None] - prototypes).square()
        if self.distance == "squared":
            return gap.sum(-1)
        mean = gap.mean(-1)
        # The gradient of the root is infinite at 0: replace 0 by the smallest normal number.
        return torch.where(mean > 0, mean, torch.finfo(mean.dtype).tiny).sqrt()

    def table(self, tree: Tree) -> Tensor:
        """Return the prototypes of all classes of the run.

        Args:
            tree: Tree with ``frozen.before``, ``prototype`` and ``frozen.after``.

        Returns:
            Prototypes [C, D].
        """
        return torch.cat([tree["frozen.before"], tree["prototype"], tree["frozen.after"]])
