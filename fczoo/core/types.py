"""The types that pass between methods, the engine and the server."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import quote
from fczoo.core.payload import Payload, Uploads
from fczoo.core.schedules import SCHEDULES
from fczoo.core.tasks import Partitioner as Partitioner
from fczoo.core.tasks import Task as Task
from fczoo.core.tree import Tree

TaskPhase = Literal["task_start", "after_training", "task_end"]
"""Phases of a task in which clients collect sums over their images, in one pass without training.

task_start: before the rounds. after_training: in each round, under the client's trained tensors.
task_end: after the rounds.
"""

Boundary = Literal["task_start", "after_rounds", "task_end"]
"""Boundaries of a task, at which clients upload something without training.

after_rounds: clients update their memory once the rounds are over.
"""

Scope = Literal["task", "latest", "seen", "pooled"]
"""Images on which a client trains.

task: its own of the task. latest: its own of the last task that gave it any. seen: its own of all
tasks so far. pooled: those of all clients, of all tasks so far, in one place.
"""


class Batch(NamedTuple):
    """One mini-batch of one client. Padding rows have weight 0 and repeat a real row."""

    x: Tensor  # [B, 3, H, W] normalised images; [B, 0] for a method that reads only frozen features
    y: Tensor  # [B] labels in order of arrival
    w: Tensor  # [B] 1 = real sample, 0 = padding
    # [B, D] feature of the frozen backbone; [B, 0] for a method that does not ask for it
    query: Tensor
    # [B, C] the teacher's outputs for the same view; [B, 0] without one
    teacher: Tensor = torch.empty(0, 0)
    # [C] the client's training images of each class; [0] elsewhere
    class_count: Tensor = torch.empty(0)
    # [B] positions in the training store; [0] elsewhere
    position: Tensor = torch.empty(0, dtype=torch.int64)
    # [B, n] uniform in [0, 1); [B, 0] for a method that asks for none
    draws: Tensor = torch.empty(0, 0)

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average a tensor over the real samples. Every loss averages through this.

        Args:
            per_sample: One value per row [B].

        Returns:
            The mean, a scalar; 0 without real samples.
        """
        return (per_sample * self.w).sum() / self.w.sum().clamp(min=1)


def to_tensor(given: Any, name: str) -> Tensor:
    """Return a tensor, of an array or list as well.

    Args:
        given: Tensor, array of NumPy, list or number.
        name: Name of the value for messages.

    Raises:
        FczooError: The value is anything else.
    """
    if isinstance(given, Tensor):
        return given
    try:
        array = np.asarray(given)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise FczooError(
            f"{name}: {quote(given)} is not a tensor; give one, or an array of numbers"
        )
    return torch.tensor(given.copy() if isinstance(given, np.ndarray) else given)


def _about(tensor: Tensor) -> str:
    """Return the type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def whole_batch(x: Tensor, y: Tensor, query: Tensor | None = None) -> Batch:
    """Create a batch without padding, to try a method by hand.

    Arrays of NumPy and lists are accepted, too.

    Args:
        x: Normalised images [B, 3, H, W], or [B, 0] for a method that reads only frozen features.
        y: Labels [B] in order of arrival.
        query: Features [B, D] of the frozen backbone, for a method that reads them.

    Raises:
        FczooError: Shapes or types do not fit.
    """
    x, y = to_tensor(x, "images"), to_tensor(y, "labels")
    query = None if query is None else to_tensor(query, "query")
    if not x.is_floating_point() or x.ndim not in (2, 4):
        raise FczooError(
            f"images are {_about(x)}; give floating-point numbers [B, 3, H, W], normalised"
        )
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
        raise FczooError(f"labels are {_about(y)}; give {len(x)} whole numbers, one per image")
    if query is not None and (query.ndim < 2 or len(query) != len(x)):
        raise FczooError(
            f"query is {_about(query)}; give features [{len(x)}, D], such as backbone(images)"
        )
    y = y.long()
    none = torch.empty(len(y), 0, dtype=x.dtype, device=x.device)
    return Batch(x, y, torch.ones_like(y, dtype=x.dtype), none if query is None else query)


@dataclass(frozen=True)
class Context:
    """Context of a client: position in the run and the server's broadcast."""

    task: Task
    round: int  # within the task
    rounds: int  # per task
    # all that the server broadcast, trained tensors as the round begins included; read-only
    shared: Tree
    # what this client keeps; in functions of HasClientMemory and EndsTasks, and in the losses of
    # methods with client memory
    memory: Tree = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Return whether it is the last round, on exemplars only; see ``Training.balanced``."""
        return self.round == self.rounds


@dataclass(frozen=True)
class ServerContext:
    """Context of the server in addition to its state and the merged uploads."""

    task: Task
    round: int  # within the task; 0 in a survey at its beginning, ``rounds`` in one at its end
    rounds: int  # per task
    clients: int  # N, of the whole run
    participants: int  # |S|, those behind the merged uploads
    num_samples: int  # images behind the merged uploads
    backbone: Backbone
    rng: torch.Generator


@dataclass(frozen=True)
class Exchange:
    """One exchange between server and clients: a round, or one at the boundary of a task."""

    task: Task
    round: int = -1  # within the task; -1: a survey
    boundary: Boundary | None = None
    balanced: bool = False  # the round after the last, on exemplars only

    @property
    def is_training_round(self) -> bool:
        """Return whether clients train on their data in it, not only on exemplars."""
        return self.boundary is None and not self.balanced

    @property
    def label(self) -> int | str:
        """Return the name of the exchange in records: the number of the round, or the boundary."""
        return self.boundary or self.round

    def __str__(self) -> str:
        return f"task {self.task.index + 1}, {self.boundary or f'round {self.round + 1}'}"


OptimizerName = Literal["adam", "adamw", "sgd"]
INPUTS = ("images", "query")  # what batches can hold


@dataclass(frozen=True)
class Optim:
    """Optimizer of one group of tensors on a client, created again in every round."""

    name: OptimizerName = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str = "constant"  # a key of fczoo.core.schedules.SCHEDULES

    def __post_init__(self) -> None:
        """Check that the optimizer and the schedule are known.

        Raises:
            FczooError: One of them is unknown.
        """
        _one_of(self.name, get_args(OptimizerName), "optimizer")
        _one_of(self.schedule, SCHEDULES, "schedule of a learning rate")


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
    # whether ``aggregate`` returns each trained tensor as an average of the clients' own, from which
    # a server optimizer can continue
    averages_trained: bool = True
    # largest norm of one client's gradient, over all tensors that it trains
    clip_norm: float | None = None
    # ``seen`` and ``pooled`` keep old images: upper bounds, not competitors
    data_scope: Scope = "task"
    # uniform numbers per image in ``Batch.draws``, since a loss cannot draw under vmap. In training
    # they are new in each step; in a survey they are the image's own, whoever holds it
    draws: int = 0
    # a client's draws at a task boundary are spread evenly in [0, 1): equal parts of it are equal
    # parts of its images
    stratified_draws: bool = False
    # ``update_from`` gets the clients' sums side by side [K, ...] instead of their total
    per_client_statistics: bool = False
    # phases in which clients call ``collect``
    collect_at: Collection[TaskPhase] = ()
    # clients that collect as a task ends: all with images of it, or those that trained in it
    collect_from: Literal["all", "trained"] = "all"
    # view of the images that are collected after training; at task boundaries it is "test"
    collect_view: Literal["test", "train"] = "test"
    # memory tensor with positions of kept images, which join the client's training
    exemplars: str = ""
    # (images of the task, exemplars) -> positions on which a client trains; None: on both, each
    # once
    trains_on: "Callable[[LocalData, Tensor], Tensor] | None" = None
    # what clients train in one more round, on their exemplars only, at the end of each task but
    # the first
    balanced: Mapping[str, Optim] = field(default_factory=dict)
    # whether the softmax of ``predict`` estimates probabilities; distances and least-squares scores
    # only order the classes
    gives_logits: bool = True
    # note under every table of the method's results, such as an upper bound
    table_note: str = ""
    # (task, round) -> prefixes trained in that round; None: all of optims
    active_prefixes: Callable[[Task, int], Collection[str]] | None = None

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
            _one_of(name, INPUTS, "input of a batch")
        for phase in self.collect_at:
            _one_of(phase, get_args(TaskPhase), "phase of a task")
        _one_of(self.collect_view, ("test", "train"), "view of images")

    @property
    def trained_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all that is trained in any round."""
        return tuple({**self.optims, **self.balanced})

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
        return {prefix: optim for prefix, optim in self.optims.items() if prefix in chosen}


def _one_of(name: str, known: Iterable[str], kind: str) -> None:
    if name not in known:
        raise FczooError(f"training() asks for the {kind} {name!r}; known: {', '.join(known)}")


class LocalData(Protocol):
    """A client's own images, by their positions in the training store."""

    @property
    def index(self) -> Tensor:
        """Return positions [n] of its images of the current task."""

    @property
    def earlier(self) -> Tensor:
        """Return positions [m] of its images of earlier tasks, even of tasks that it missed."""

    def labels(self, index: Tensor) -> Tensor:
        """Return labels [n] in order of arrival.

        Args:
            index: Positions [n] in the training store.
        """

    def batches(self, index: Tensor) -> Iterator[Batch]:
        """Yield the test view of some images, in order.

        Args:
            index: Positions [n] in the training store.
        """


@dataclass(frozen=True)
class Evidence:
    """Data that ``Diagnoses.diagnose`` may use."""

    task: Task
    tasks: Sequence[Task]  # of the whole run
    state: Tree  # the server's
    # of the task's last round, before they are merged; empty at the end of it
    payloads: Sequence[Payload]
    backbone: Backbone
    images: Callable[[Task], Iterator[Batch]]  # test images of a task


Finding = Mapping[str, Any]
"""What a method reports of itself: plain values and lists, as JSON keeps them."""


class ServerAggregator(Protocol):
    """Pure function from the payloads of one round to one tree."""

    def __call__(self, payloads: Sequence[Payload], /) -> Tree: ...
