"""Declaration of a method: optimizers, data and uploads."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.lr_schedules import SCHEDULES
from fczoo.core.payload import Uploads
from fczoo.core.tasks import Task
from fczoo.core.types import LocalData

TaskPhase = Literal["task_start", "after_training", "before_exemplars", "task_end"]
"""Phases of a task in which clients collect sums over their images, in one pass without training.

task_start: before the rounds. after_training: in each round, under the client's trained tensors.
before_exemplars: after the rounds, before clients choose exemplars (``EndsTasks``). task_end: after
that, exemplars included.
"""

Scope = Literal["task", "latest", "seen", "pooled"]
"""Images on which a client trains.

task: its own of the task. latest: its own of the last task that gave it any. seen: its own of all
tasks so far. pooled: those of all clients, of all tasks so far, in one place.
"""

OptimizerName = Literal["adam", "adamw", "sgd"]
INPUTS = ("images", "query")  # what batches can hold


@dataclass(frozen=True)
class Optim:
    """Optimizer of one group of tensors on a client, created again in every round."""

    name: OptimizerName = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str = "constant"  # of the learning rate; see core/lr_schedules.py

    def __post_init__(self) -> None:
        """Check that the optimizer and the schedule are known.

        Raises:
            FczooError: One of them is unknown.
        """
        _check_name(self.name, get_args(OptimizerName), "optimizer")
        _check_name(self.schedule, SCHEDULES, "learning-rate schedule")


OLD_TRAINING_OPTIONS = {
    "scope": "data_scope",
    "even_draws": "stratified_draws",
    "separate": "per_client_statistics",
    "asked": "collect_from",
    "stats": "collect_at",
    "statistics_view": "collect_view",
    "active": "active_prefixes",
}
"""Old options of ``Training`` -> today's."""


@dataclass(frozen=True)
class Training:
    """Declaration of a method: trained tensors, data, and uploads of a round."""

    # state prefix -> optimizer; empty: the method only collects statistics
    optims: Mapping[str, Optim] = field(default_factory=dict)
    # what batches hold: images, query (frozen feature of the same view)
    inputs: Collection[str] = ("images",)
    # declared groups next to what is trained; see core/payload.py
    uploads: Uploads = field(default_factory=dict)
    averaging: str = "fedavg"  # registered aggregator for the part that is averaged
    # whether ``aggregate`` averages each trained tensor over the clients, as a server optimizer
    # needs
    averages_trained: bool = True
    # largest norm of one client's gradient, over all tensors that it trains
    clip_norm: float | None = None
    # ``seen`` and ``pooled`` keep old images: upper bounds, not competitors
    data_scope: Scope = "task"
    # uniform numbers per image in ``Batch.draws``, since a loss cannot draw under vmap. In training
    # they are new in each step; at a task boundary they are fixed per image, whoever holds it
    draws: int = 0
    # whether a client's draws at a task boundary are spread evenly in [0, 1), so that intervals of
    # equal length hold equally many of its images
    stratified_draws: bool = False
    # ``update_from`` gets the clients' sums side by side [K, ...] instead of their total
    per_client_statistics: bool = False
    # phases in which clients call ``collect``
    collect_at: Collection[TaskPhase] = ()
    # tasks at whose boundaries clients collect: all, or the first, as for the scale of features
    collect_in: Literal["all", "first"] = "all"
    # clients that collect at task end: all with images of the task, or those that trained in it
    collect_from: Literal["all", "trained"] = "all"
    # view of the images in ``collect`` after training and at task end: the test view, the whole
    # image without the test view's crop, or the random views of training
    collect_view: Literal["test", "whole", "train"] = "test"
    # passes over a client's images, each with new random views, with ``collect_view="train"``
    collect_passes: int = 1
    # name of the memory tensor with positions of exemplars, on which the client trains as well
    exemplars: str = ""
    # (images of the task, exemplars) -> positions on which a client trains; None: on both, each
    # once
    trains_on: Callable[[LocalData, Tensor], Tensor] | None = None
    # what clients train in one more round, on their exemplars only, at the end of each task but
    # the first
    balanced: Mapping[str, Optim] = field(default_factory=dict)
    # whether the softmax of ``predict`` estimates probabilities; distances and least-squares scores
    # only order the classes
    gives_logits: bool = True
    # whether every client has its own model, which its memory stores between rounds: nothing is
    # sent, clients start from their memory, and evaluation averages over the models
    own_models: bool = False
    # note under every table of the method's results, such as an upper bound
    table_note: str = ""
    # (task, round) -> prefixes trained in that round, or their optimizers where these differ from
    # optims by task; None: all of optims
    active_prefixes: Callable[[Task, int], Collection[str] | Mapping[str, Optim]] | None = None

    def __new__(cls, *values: Any, **named: Any) -> "Training":
        """Raise TypeError for old options, with the new names."""
        if old_names := [
            f"{old} is now {OLD_TRAINING_OPTIONS[old]}"
            for old in named
            if old in OLD_TRAINING_OPTIONS
        ]:
            raise TypeError(f"Training got old options: {', '.join(old_names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check inputs, phases and view.

        Raises:
            FczooError: One of them is unknown.
        """
        for name in self.inputs:
            _check_name(name, INPUTS, "input of a batch")
        for phase in self.collect_at:
            _check_name(phase, get_args(TaskPhase), "phase of a task")
        _check_name(self.collect_view, ("test", "whole", "train"), "view of images")

    @property
    def trained_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all that is trained in any round."""
        return tuple({**self.optims, **self.balanced})

    def collects_at(self, phase: TaskPhase, task: Task) -> bool:
        """Return whether clients collect sums in a phase at a boundary of a task.

        Args:
            phase: Phase of the task.
            task: The task.
        """
        return phase in self.collect_at and (self.collect_in == "all" or task.index == 0)

    def active_optims(self, task: Task, round: int, balanced: bool = False) -> Mapping[str, Optim]:
        """Return the optimizers of one round by prefix; empty if the task has no such round.

        Args:
            task: The current task.
            round: Number of the round in its task, from 0.
            balanced: Whether it is the round after the last, on exemplars only.
        """
        if balanced:
            return self.balanced
        if self.active_prefixes is None:
            return self.optims
        chosen = self.active_prefixes(task, round)
        if isinstance(chosen, Mapping):
            return chosen
        return {prefix: optim for prefix, optim in self.optims.items() if prefix in chosen}


def _check_name(name: str, known: Iterable[str], kind: str) -> None:
    if name not in known:
        raise FczooError(f"training() has an unknown {kind} {name!r}; known: {', '.join(known)}")
