"""The types that pass between methods, the engine and the server."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import quoted
from fczoo.core.payload import Payload, Uploads
from fczoo.core.schedules import SCHEDULES
from fczoo.core.tasks import Partitioner as Partitioner
from fczoo.core.tasks import Task as Task
from fczoo.core.tree import Tree

Moment = Literal["begin", "end"]
"""The boundaries of a task at which clients may be surveyed."""

Boundary = Literal["begin", "conclude", "end"]
"""Where clients send something without training: those moments, and where they settle what they keep."""

Scope = Literal["task", "latest", "seen", "pooled"]
"""Images on which a client trains.

task: its own of the task. latest: its own of the last task that gave it any. seen: its own of all tasks so
far. pooled: everybody's of all tasks so far, in one place.
"""


class Batch(NamedTuple):
    """One mini-batch of one client. Padding rows have weight 0 and repeat a real row."""

    x: Tensor  # [B, 3, H, W] normalised images; [B, 0] for a method that reads only frozen features
    y: Tensor  # [B] labels in order of arrival
    w: Tensor  # [B] 1 = real sample, 0 = padding
    query: Tensor  # [B, D] feature of the frozen backbone; [B, 0] for a method that does not ask for it
    teacher: Tensor = torch.empty(0, 0)  # [B, C] the teacher's outputs for the same view; [B, 0] without one
    class_count: Tensor = torch.empty(0)  # [C] the client's training images of each class; [0] elsewhere
    position: Tensor = torch.empty(0, dtype=torch.int64)  # [B] positions in the training store; [0] elsewhere
    draws: Tensor = torch.empty(0, 0)  # [B, n] uniform in [0, 1); [B, 0] for a method that asks for none

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average of a [B] tensor over the real samples. Every loss averages through this."""
        return (per_sample * self.w).sum() / self.w.sum().clamp(min=1)


def to_tensor(given: Any, name: str) -> Tensor:
    """Return a tensor, of an array or list as well. Raises FczooError for anything else."""
    if isinstance(given, Tensor):
        return given
    try:
        array = np.asarray(given)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise FczooError(f"{name}: {quoted(given)} is not a tensor; give one, or an array of numbers")
    return torch.tensor(given.copy() if isinstance(given, np.ndarray) else given)


def _about(tensor: Tensor) -> str:
    """Return the type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def whole_batch(x: Tensor, y: Tensor, query: Tensor | None = None) -> Batch:
    """A batch without padding, to try a method by hand: images [B, 3, H, W], labels [B], frozen features.

    Arrays of NumPy and lists are taken, too. Raises FczooError where shapes or types do not fit.
    """
    x, y = to_tensor(x, "images"), to_tensor(y, "labels")
    query = None if query is None else to_tensor(query, "query")
    if not x.is_floating_point() or x.ndim not in (2, 4):
        raise FczooError(f"images are {_about(x)}; give floating-point numbers [B, 3, H, W], normalised")
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != x.shape[:1]:
        raise FczooError(f"labels are {_about(y)}; give {len(x)} whole numbers, one per image")
    if query is not None and (query.ndim < 2 or len(query) != len(x)):
        raise FczooError(f"query is {_about(query)}; give features [{len(x)}, D], such as backbone(images)")
    y = y.long()
    none = torch.empty(len(y), 0, dtype=x.dtype, device=x.device)
    return Batch(x, y, torch.ones_like(y, dtype=x.dtype), none if query is None else query)


@dataclass(frozen=True)
class Context:
    """What a client knows besides its batch: where the run stands and what the server broadcast."""

    task: Task
    round: int  # within the task
    rounds: int  # per task
    shared: Tree  # all that the server broadcast, trained tensors as the round begins included; read-only
    memory: Tree = field(
        default_factory=dict
    )  # what this client keeps; in Remembers' and Concludes' functions, and Remembers' losses

    @property
    def balanced(self) -> bool:
        """Whether it is the round after the last, on exemplars alone; see ``Training.balanced``."""
        return self.round == self.rounds


@dataclass(frozen=True)
class ServerContext:
    """What the server knows besides its state and the merged uploads."""

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
    """One exchange between server and clients: a round of a task, or one at its beginning or end."""

    task: Task
    round: int = -1  # within the task; -1: a survey
    survey: Boundary | None = None
    balanced: bool = False  # the round after the last, on exemplars alone

    @property
    def moment(self) -> int | str:
        """As records name it: the number of the round, or the survey's."""
        return self.survey or self.round

    def __str__(self) -> str:
        return f"task {self.task.index + 1}, {self.survey or f'round {self.round + 1}'}"


OptimizerName = Literal["adam", "adamw", "sgd"]
INPUTS = ("images", "query")  # what batches can hold


@dataclass(frozen=True)
class Optim:
    """How one group of tensors is trained on a client. Optimizers are made anew in every round."""

    name: OptimizerName = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str = "constant"  # a key of fczoo.core.schedules.SCHEDULES

    def __post_init__(self) -> None:
        """Raises FczooError for an unknown optimizer or schedule."""
        _one_of(self.name, get_args(OptimizerName), "optimizer")
        _one_of(self.schedule, SCHEDULES, "schedule of a learning rate")


@dataclass(frozen=True)
class Training:
    """What clients train, on what, and what they upload: everything that a method declares about a round."""

    # state prefix -> optimizer; empty: the method only surveys
    optims: Mapping[str, Optim] = field(default_factory=dict)
    # what batches hold: images, query (frozen feature of the same view)
    inputs: Collection[str] = ("images",)
    # declared groups beside what is trained; see core/payload.py
    uploads: Uploads = field(default_factory=dict)
    averaging: str = "fedavg"  # registered aggregator for the part that is averaged
    clip_norm: float | None = None  # largest norm of one client's gradient, over all tensors that it trains
    scope: Scope = "task"  # ``seen`` and ``pooled`` keep old images: upper bounds, not competitors
    # uniform numbers an image in ``Batch.draws``, since a loss cannot draw under vmap. In training they are
    # new in each step; in a survey they are the image's own, whoever holds it
    draws: int = 0
    # a client's draws of a survey lie evenly in [0, 1): equal parts of it are equal parts of its images
    even_draws: bool = False
    # ``absorb`` gets the clients' sums side by side [K, ...] instead of their total
    separate: bool = False
    # clients that the survey at a task's end asks: all with images of it, or those that trained in it
    asked: Literal["all", "trained"] = "all"
    # view of the images in the pass of ``stats``; none: no such pass
    stats: Literal["test", "train", "none"] = "none"
    exemplars: str = ""  # memory tensor with positions of kept images, which join the client's training
    # (images of the task, exemplars) -> positions on which a client trains; None: on both, each once
    trains_on: "Callable[[LocalData, Tensor], Tensor] | None" = None
    # what clients train in one more round, on their exemplars alone, at the end of each task but the first
    balanced: Mapping[str, Optim] = field(default_factory=dict)
    # (task, round) -> prefixes trained in that round; None: all of optims
    active: Callable[[Task, int], Collection[str]] | None = None

    def __post_init__(self) -> None:
        """Raises FczooError for an input that batches do not have."""
        for name in self.inputs:
            _one_of(name, INPUTS, "input of a batch")

    @property
    def trained(self) -> tuple[str, ...]:
        """Prefixes of all that is trained in any round."""
        return tuple({**self.optims, **self.balanced})

    def active_optims(self, task: Task, round: int, balanced: bool = False) -> Mapping[str, Optim]:
        """The optimizers of one round; none: the task has no such round."""
        if balanced:
            return self.balanced
        if self.active is None:
            return self.optims
        chosen = self.active(task, round)
        return {prefix: optim for prefix, optim in self.optims.items() if prefix in chosen}


def _one_of(name: str, known: Iterable[str], kind: str) -> None:
    if name not in known:
        raise FczooError(f"training() asks for the {kind} {name!r}; there are {', '.join(known)}")


class LocalData(Protocol):
    """A client's own images, by their positions in the training store."""

    @property
    def index(self) -> Tensor:
        """Positions [n] of its images of the current task."""

    @property
    def earlier(self) -> Tensor:
        """Positions [m] of its images of earlier tasks, whether it took part in them or not."""

    def labels(self, index: Tensor) -> Tensor:
        """Labels [n] in order of arrival."""

    def batches(self, index: Tensor) -> Iterator[Batch]:
        """The test view of some images, in order."""


@dataclass(frozen=True)
class Evidence:
    """What ``Diagnoses.diagnose`` may look at."""

    task: Task
    tasks: Sequence[Task]  # of the whole run
    state: Tree  # the server's
    payloads: Sequence[Payload]  # of the task's last round, before they are merged; empty at the end of it
    backbone: Backbone
    images: Callable[[Task], Iterator[Batch]]  # test images of a task


Finding = Mapping[str, Any]
"""What a method reports of itself: plain values and lists, as JSON keeps them."""


class ServerAggregator(Protocol):
    """Pure function from the payloads of one round to one tree."""

    def __call__(self, payloads: Sequence[Payload], /) -> Tree: ...
