"""The types on which every method, partitioner, aggregator and engine agrees."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .backbone import Backbone
from .options import check_options, quirks

Tree = dict[str, Tensor]
"""Flat, with dotted names such as ``lora.0.q.a``: state, broadcast, upload and checkpoint are all this."""

Moment = Literal["begin", "end"]

Scope = Literal["task", "latest", "seen", "pooled"]
"""Images of a client: its own of the task; its own of all tasks so far; everybody's of all tasks so far, in one place."""

Content = Literal["parameters", "counts", "class means", "class variances", "gradients of single images"]
"""What a payload tells a server about the data behind it."""


class Batch(NamedTuple):
    """One mini-batch of one client. Padding rows have weight 0 and repeat a real row."""

    x: Tensor  # [B, 3, H, W] normalised images; [B, 0] for a method that reads only frozen features
    y: Tensor  # [B] labels in order of arrival
    w: Tensor  # [B] 1 = real sample, 0 = padding
    q: Tensor  # [B, D] feature of the frozen backbone; [B, 0] for a method that does not ask for it
    t: Tensor = torch.empty(0, 0)  # [B, C] what the method's teacher says of the same view; [B, 0] without a teacher
    n: Tensor = torch.empty(0)  # [C] images of each class on which the client trains; [0] outside of training

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average of a [B] tensor over the real samples. Every loss averages through this."""
        return (per_sample * self.w).sum() / self.w.sum().clamp(min=1)


@dataclass(frozen=True)
class Task:
    """Classes are numbered in order of arrival, so a task is a range of labels."""

    index: int
    start: int  # first new class
    stop: int  # one past the last class seen so far
    classes: int  # over all tasks
    count: int  # number of tasks

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Context:
    """What a client knows besides its batch: where the run stands and what the server broadcast."""

    task: Task
    round: int  # within the task
    rounds: int  # per task
    shared: Tree  # all that the server broadcast, trained tensors as the round begins included; read-only
    memory: Tree = field(default_factory=dict)  # what this client keeps from round to round; see Method.prepare


@dataclass(frozen=True)
class Optim:
    """How one group of tensors is trained on a client. Optimizers are made anew in every round."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str = "constant"  # a key of fczoo.schedules.SCHEDULES


class LocalData(Protocol):
    """A client's own images, by their positions in the training store."""

    @property
    def index(self) -> Tensor:
        """Positions [n] of its images of the current task."""

    def labels(self, index: Tensor) -> Tensor: ...
    def batches(self, index: Tensor) -> Iterator[Batch]:
        """The test view of some images, in order."""


class ServerAggregator(Protocol):
    """Pure function from the payloads of one round to one tree. Payloads carry ``num_samples`` and ``client``."""

    def __call__(self, payloads: Sequence[Tree], /) -> Tree: ...


class Partitioner(Protocol):
    """Pure function from the labels of one task to one array of positions a client.

    One with an attribute ``scope = "dataset"`` gets all labels at once, before they are cut into tasks; one with
    ``disjoint = False`` may give an image to several clients or to none.
    """

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, /) -> list[np.ndarray]: ...


class Method(ABC):
    """A frozen dataclass of hyper-parameters plus pure functions over trees.

    A method says what one client's loss is on one batch, what a client uploads and how the server merges the uploads.
    Loops, devices, optimizers, loaders and logs belong to the engine.

    State is split by the prefixes of its names: those in ``optims()`` are trained by the clients and uploaded, those in
    ``private`` never leave the server, everything else is broadcast read-only.
    """

    name: ClassVar[str] = ""  # filled by the registry
    paper: ClassVar[str] = ""
    private: ClassVar[tuple[str, ...]] = ()
    frozen: ClassVar[tuple[str, ...]] = ()  # state prefixes of what finished tasks left, row by row: rows join, none changes
    averaging: ClassVar[str] = "fedavg"  # registered aggregator for the part that is averaged
    uploads: ClassVar[Mapping[str, Content]] = {}  # payload prefix -> content, where it is not parameters
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # data set -> hyper-parameters that differ from the defaults there

    def __post_init__(self) -> None:
        check_options(self)

    def inputs(self) -> frozenset[str]:
        """What batches must hold: ``images``, ``query`` (the frozen backbone's feature of the same view), or both."""
        return frozenset({"images"})

    def clip_norm(self) -> float | None:
        """Largest norm of one client's gradient, over all tensors that it trains."""
        return None

    def remark(self) -> str:
        """What a reader of its results must know: an upper bound, a cheap mode, a quirk. Shown under every table."""
        on = [f"{name}={getattr(self, name)}" for name, value, _ in quirks(type(self)) if getattr(self, name) == value]
        return f"with {', '.join(on)}, as in released code" if on else ""

    def scope(self) -> Scope:
        """Which images clients train on: the task's; those of the last task that gave them any; all so far, or all in one place.

        ``seen`` and ``pooled`` keep old images: upper bounds, not competitors.
        """
        return "task"

    def surveys(self) -> frozenset[Moment]:
        """Task boundaries at which clients report sums over their data without training."""
        return frozenset()

    def stats_view(self) -> Literal["test", "train"]:
        """View of the images in the pass of ``stats``."""
        return "test"

    def optims(self) -> Mapping[str, Optim]:
        """State prefix -> optimizer: what clients train. Empty: there are no rounds, only surveys."""
        return {}

    @abstractmethod
    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Server: the state for a new task. An empty ``state`` starts the run."""

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        """Client: a scalar loss, and sums that the engine accumulates over the steps of the round."""
        raise TypeError(f"{type(self).__name__} trains something but does not define loss()")

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """Client: outputs [B, C] of a teacher that stands still during the task, handed to ``loss`` as ``batch.t``.

        Computed without gradients; kept, image by image, where the view of the images is fixed.
        """
        raise TypeError(f"{type(self).__name__} does not define teach()")

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Client: what it remembers, before it trains. A method that defines this or ``finish`` trains clients one by one.

        The client trains on its images of the task and on those whose positions the memory holds as ``exemplar.index``.
        """
        return ctx.memory

    def finish(self, backbone: Backbone, train: Tree, data: LocalData, ctx: Context) -> Tree:
        """Client: what it uploads besides ``pack``, once it has trained."""
        return {}

    @abstractmethod
    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        """Server: logits over the classes seen so far, [B, task.stop]."""

    def choices(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor | None:
        """Server, for diagnostics: how often each image takes each prompt of a pool [B, M]; None without a pool."""
        return None

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        """Client: sums over one pass of the local data after training."""
        return {}

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        """Client: the upload."""
        return {**train, **sums}

    def aggregate(self, payloads: Sequence[Tree], average: ServerAggregator) -> Tree:
        """Server: merge the uploads. ``average`` is used for whatever is averaged."""
        return average(payloads)

    def server_update(self, state: Tree, merged: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Server: fold the merged uploads into the state."""
        return {**state, **merged}

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        """Client: sums over one pass of the local data at a task boundary; ``state`` is what the server broadcast."""
        raise TypeError(f"{type(self).__name__} asks for a survey but does not define survey()")

    def absorb(self, moment: Moment, state: Tree, sums: Tree, task: Task) -> Tree:
        """Server: fold the surveyed sums, added up over all clients, into the state."""
        raise TypeError(f"{type(self).__name__} asks for a survey but does not define absorb()")


def overrides(method: Method, name: str) -> bool:
    """Whether a method has a function of its own in place of the interface's."""
    return getattr(type(method), name) is not getattr(Method, name)


def keep_rows(payload: Tree, prefix: str, keep: Tensor) -> Tree:
    """The upload with only some rows [g] of its class statistics under a prefix.

    Rows beside a ``label`` are cut out; of tensors with one row a class of the task the others become 0, whose count of 0
    says that the client does not have the class.
    """
    rows = select(payload, prefix)
    if f"{prefix}label" in payload:
        return {**payload, **{k: v[keep.to(v.device)] for k, v in rows.items()}}
    return {**payload, **{k: torch.where(keep.to(v.device).view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)) for k, v in rows.items()}}


def content_of(name: str, uploads: Mapping[str, Content]) -> Content:
    """What a tensor of a payload tells, by ``Method.uploads``."""
    return next((content for prefix, content in uploads.items() if name.startswith(prefix)), "parameters")


def select(tree: Tree, *prefixes: str) -> Tree:
    """The entries whose name starts with one of the prefixes."""
    return {k: v for k, v in tree.items() if k.startswith(prefixes)}


def drop(tree: Tree, *prefixes: str) -> Tree:
    """The entries whose name starts with none of the prefixes."""
    return {k: v for k, v in tree.items() if not k.startswith(prefixes)}


def nbytes(tree: Tree) -> int:
    """Size of all tensors, bytes."""
    return sum(v.numel() * v.element_size() for v in tree.values())
