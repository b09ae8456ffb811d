"""The interface of every method."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import check_options, quirks
from fczoo.core.payload import Content
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData, Moment, Optim, Scope, ServerAggregator, Task


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
    frozen: ClassVar[
        tuple[str, ...]
    ] = ()  # state prefixes of what finished tasks left, row by row: rows join, none changes
    averaging: ClassVar[str] = "fedavg"  # registered aggregator for the part that is averaged
    uploads: ClassVar[Mapping[str, Content]] = {}  # payload prefix -> content, where it is not parameters
    tuned: ClassVar[
        Mapping[str, Mapping[str, Any]]
    ] = {}  # data set -> hyper-parameters that differ from the defaults there

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
        on = [
            f"{name}={getattr(self, name)}"
            for name, value, _ in quirks(type(self))
            if getattr(self, name) == value
        ]
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

    def server_update(
        self, state: Tree, merged: Tree, task: Task, backbone: Backbone, rng: torch.Generator
    ) -> Tree:
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
