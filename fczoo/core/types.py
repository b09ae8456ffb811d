"""Types that pass between methods, engine and server, and the optional parts of a method."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import quote
from fczoo.core.payload import Payload
from fczoo.core.tasks import Partitioner as Partitioner
from fczoo.core.tasks import Task as Task
from fczoo.core.tree import Tree

Boundary = Literal["task_start", "before_exemplars", "after_rounds", "task_end"]
"""Boundaries of a task, at which clients upload something without training.

before_exemplars: the rounds are over, the memories are as before. after_rounds: clients update
their memory.
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
    # [B, n] uniform in [0, 1); [B, 0] for a method without ``Training.draws``
    draws: Tensor = torch.empty(0, 0)
    # [B] local epoch of the round in training, from 0; [0] elsewhere
    epoch: Tensor = torch.empty(0, dtype=torch.int64)
    # [B] number of the client, -1 for test images; [0] elsewhere
    client: Tensor = torch.empty(0, dtype=torch.int64)

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average a tensor over the real samples. Every loss averages through this.

        Args:
            per_sample: One value per row [B].

        Returns:
            The mean, a scalar; 0 without real samples.
        """
        return (per_sample * self.w).sum() / self.w.sum().clamp(min=1)


def to_tensor(given: Any, name: str) -> Tensor:
    """Convert an array, list or number to a tensor; return a tensor unchanged.

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
        problem = f"{name}: {quote(given)} is not a tensor"
        raise FczooError(f"{problem}; give a tensor or an array of numbers")
    return torch.tensor(given.copy() if isinstance(given, np.ndarray) else given)


def _about(tensor: Tensor) -> str:
    """Return the type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def whole_batch(x: Tensor, y: Tensor, query: Tensor | None = None) -> Batch:
    """Create a batch without padding, to try a method by hand.

    NumPy arrays and lists are accepted as well.

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
    # the server's broadcast, with the trained tensors at the start of the round; read-only
    shared: Tree
    # memory of this client; in functions of HasClientMemory and EndsTasks, and in the losses of
    # methods with client memory
    memory: Tree = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Return whether it is the additional round on exemplars; see ``Training.balanced``."""
        return self.round == self.rounds


@dataclass(frozen=True)
class ServerContext:
    """Context of the server in addition to its state and the merged uploads."""

    task: Task
    round: int  # within the task; 0 for statistics at its start, ``rounds`` for those at its end
    rounds: int  # per task
    clients: int  # N, of the whole run
    participants: int  # |S|, those behind the merged uploads
    num_samples: int  # images behind the merged uploads
    backbone: Backbone
    rng: torch.Generator
    senders: tuple[int, ...] = ()  # their numbers, in the order of uploads side by side [K, ...]


@dataclass(frozen=True)
class Exchange:
    """One exchange between server and clients: a round, or one at the boundary of a task."""

    task: Task
    round: int = -1  # within the task; -1: at its boundary
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
    # uploads of the task's last round before merging; empty at the end of the task
    payloads: Sequence[Payload]
    backbone: Backbone
    images: Callable[[Task], Iterator[Batch]]  # test images of a task


Finding = Mapping[str, Any]
"""What a method reports of itself: plain values and lists, as JSON keeps them."""


ServerAggregator = Callable[[Sequence[Payload]], Tree]
"""Pure function from the payloads of one round to one tree."""


@runtime_checkable
class HasTeacher(Protocol):
    """A method with a teacher that is fixed during a task."""

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """Return the teacher's outputs [B, C], which ``loss`` gets as ``batch.teacher``.

        They are computed without gradients, and cached per image if the view of images is fixed.

        Args:
            backbone: Frozen backbone.
            shared: The server's broadcast.
            batch: Training images.
            task: The current task.
        """


@runtime_checkable
class HasClientMemory(Protocol):
    """A method whose clients keep a memory between rounds; such clients train one by one."""

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Return the client's memory before it trains.

        Args:
            backbone: Frozen backbone.
            data: The client's images.
            ctx: Context with the memory of the last round.
        """

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's memory after training, and uploads in addition to ``make_upload``.

        Args:
            backbone: Frozen backbone.
            train: The client's trained tensors.
            sums: Sums of ``loss`` and ``collect``.
            data: The client's images.
            ctx: Context with the memory that ``before_training`` returned. The client keeps that
                memory if its training fails.
        """


@runtime_checkable
class EndsTasks(Protocol):
    """A method whose clients update their memory after the rounds of a task.

    Sums that they upload reach the server by ``update_from("after_rounds", ...)``.
    """

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's memory after a task, and sums that it uploads, if any.

        Called for all clients that have images of the task or exemplars.

        Args:
            backbone: Frozen backbone.
            data: The client's images.
            ctx: Context with the earlier memory and the state after the last round (``shared``).
        """


@runtime_checkable
class Diagnoses(Protocol):
    """A method that reports numbers which explain its results."""

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        """Return records by their kind.

        Called with the uploads of a task's last round, and once more at the end of the task.

        Args:
            evidence: State, uploads, backbone and test images.
        """


OPTIONAL = {
    protocol.__name__: sorted(name for name in vars(protocol) if not name.startswith("_"))
    for protocol in (HasTeacher, HasClientMemory, EndsTasks, Diagnoses)
}
"""Optional protocol -> the functions that make it up."""
