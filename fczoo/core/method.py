"""The interface of every method."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, declared, quirks
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import (
    Batch,
    Context,
    Evidence,
    Finding,
    LocalData,
    Moment,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)


def _with_query(predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``predict`` of a class; it raises FczooError where features that it reads are missing."""

    @wraps(predict)
    def checked(self: "Method", backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        try:
            return predict(self, backbone, state, batch, task)
        except RuntimeError as error:  # of shapes; some methods ask for features in training alone
            if batch.query.shape[-1] or "query" not in self.training().inputs:
                raise
            problem = f"{self.name} predicts from features of the frozen backbone, and the batch has none"
            raise FczooError(f"{problem}; give whole_batch(images, labels, backbone(images))") from error

    return checked


@dataclass(frozen=True)
class Method(ABC):
    """A frozen dataclass of hyper-parameters plus pure functions over trees of tensors.

    A method says what one client's loss is on one batch, what a client uploads and how the server merges
    the uploads. Loops, devices, optimizers, loaders and logs belong to the engine.

    State is split by the prefixes of its names: those in ``training().optims`` are trained by the clients
    and uploaded, those in ``private`` never leave the server, everything else is broadcast read-only.

    ======================  =======  ======================================================================
    called                  by       with, and what for
    ======================  =======  ======================================================================
    training()              anybody  what clients train, on what, and what they upload
    begin_task(...)         server   the state of the last task (empty at first); returns the new task's
    survey("begin", ...)    client   each batch of its images, before the rounds: sums (``Surveys``)
    absorb("begin", ...)    server   these sums over all clients (or side by side); returns the state
    prepare(...)            client   each round: what it remembers, before it trains (``Remembers``)
    teach(...)              client   a batch: outputs of a teacher that stands still in the task (``Distils``)
    loss(...)               client   each batch of each epoch: a scalar, and sums over the round
    stats(...)              client   each batch of one pass after training: sums
    pack(...)               client   what it trained and the sums; returns the upload
    finish(...)             client   what it remembers from now on, and what else it uploads (``Remembers``)
    aggregate(...)          server   the uploads of the round; returns one tree
    server_update(...)      server   that tree; returns the state
    conclude(...)           client   after the last round: what it keeps of the task (``Concludes``)
    concluded(...)          server   what clients sent as they did so, added up; returns the state
    loss(...)               client   in one more round, on exemplars alone, with ``Training.balanced``
    survey("end", ...)      client   as at the beginning, exemplars included; ``absorb("end", ...)`` follows
    predict(...)            server   a batch of test images: logits over the classes seen so far
    diagnose(...)           server   with ``--diagnostics``: numbers that explain it (``Diagnoses``)
    ======================  =======  ======================================================================

    A whole method::

        @register_method("linear")
        @dataclass(frozen=True)
        class Linear(Method):
            \"\"\"A linear head on frozen features.\"\"\"

            lr: float = option(1e-2, "learning rate", low=0)

            def training(self):
                return Training(optims={"head.": Optim(lr=self.lr)}, inputs=["query"])

            def begin_task(self, state, task, backbone, rng):
                return state or linear_head(task, backbone.dim, rng)

            def loss(self, backbone, train, batch, ctx):
                return task_cross_entropy(head_logits(train, batch.query), batch, ctx.task), {}

            def predict(self, backbone, state, batch, task):
                return head_logits(state, batch.query)[:, : task.stop]
    """

    name: ClassVar[str] = ""  # filled by the registry
    paper: ClassVar[str] = ""
    formulas: ClassVar[str] = ""  # Markdown with LaTeX between dollars, for its page in the handbook
    private: ClassVar[tuple[str, ...]] = ()  # state prefixes that never leave the server
    # state prefixes of finished tasks, row by row: rows join, none changes
    frozen: ClassVar[tuple[str, ...]] = ()
    # labels may come back in a later task (--tasks domains, --moving): what the server has of them is added
    # to. A survey then asks a client for those images alone that it did not have in the task before
    returning: ClassVar[bool] = False
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # data set -> hyper-parameters that differ there

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a method with only a part of an optional protocol: it would never be called."""
        super().__init_subclass__()
        if "predict" in vars(cls):
            cls.predict = _with_query(vars(cls)["predict"])  # type: ignore[method-assign]
        for protocol, members in OPTIONAL.items():
            missing = [f"{name}()" for name in members if not hasattr(cls, name)]
            defined = [f"{name}()" for name in members if hasattr(cls, name)]
            if defined and missing:
                raise TypeError(
                    f"{cls.__name__} defines {', '.join(defined)} but not {', '.join(missing)}: "
                    f"{protocol} needs them all"
                )

    def __post_init__(self) -> None:
        check_options(self)

    def remark(self) -> str:
        """What a reader of its results must know, shown under every table: an upper bound, a quirk."""
        switched = [
            f"{name}={getattr(self, name)}"
            for name, value, *_ in quirks(declared(type(self)))
            if getattr(self, name) == value
        ]
        return f"with {', '.join(switched)}, as in released code" if switched else ""

    # --- required

    @abstractmethod
    def training(self) -> Training:
        """What clients train, on what, and what they upload."""

    @abstractmethod
    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Server: the state for a new task. An empty ``state`` starts the run."""

    @abstractmethod
    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        """Server: logits over the classes seen so far, [B, task.stop]."""

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """What ``predict`` reads of the images under a state, [B, D]: frozen features, unless redefined."""
        return batch.query if batch.query.shape[-1] else backbone(batch.x)

    # --- client

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        """A scalar loss, and sums that the engine accumulates over the steps of the round."""
        raise TypeError(f"{type(self).__name__} trains something but does not define loss()")

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        """Sums over one pass of the local data after training, if ``Training.stats`` asks for the pass."""
        raise TypeError(f"{type(self).__name__} asks for a pass of stats but does not define stats()")

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        """The upload, from what was trained and the sums of ``loss`` and ``stats``."""
        return {**train, **sums}

    # --- server

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """Merge the uploads. ``average`` is used for whatever is averaged."""
        return average(payloads)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Fold the merged uploads into the state."""
        return {**state, **merged}


@runtime_checkable
class Surveys(Protocol):
    """A method that asks all clients for sums over their data, before or after a task, without training."""

    def surveys(self) -> frozenset[Moment]:
        """The boundaries at which it asks; none: it does not."""

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        """Client: sums over one pass of its images; ``state`` is what the server broadcast."""

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Server: fold the sums into the state: added up over all clients or, where ``Training.separate``
        says so, side by side [K, ...]."""


@runtime_checkable
class Distils(Protocol):
    """A method with a teacher that stands still during a task."""

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """Client: the teacher's outputs [B, C], handed to ``loss`` as ``batch.teacher``.

        Computed without gradients; kept, image by image, where the view of the images is fixed.
        """


@runtime_checkable
class Remembers(Protocol):
    """A method whose clients keep something from round to round; they train one by one."""

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Client: what it remembers, before it trains. ``ctx.memory`` is what it remembered before."""

    def finish(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Client: what it remembers from now on, and what it uploads besides ``pack``, once it has trained.

        ``train`` is what it has trained, ``sums`` those of ``loss`` and ``stats``, ``ctx.memory`` what
        ``prepare`` returned, which it goes on remembering where its training fails.
        """


@runtime_checkable
class Concludes(Protocol):
    """A method whose clients settle what they keep of a task, once its rounds are over."""

    def conclude(self, backbone: Backbone, data: LocalData, ctx: Context) -> tuple[Tree, Tree]:
        """Client: what it remembers from now on, and sums that it uploads, if any.

        Asked of all that have images of the task or exemplars. ``ctx.memory`` is what it remembered before,
        ``ctx.shared`` the state after the last round.
        """

    def concluded(self, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Server: fold the uploads, added up over the clients that sent some, into the state."""


@runtime_checkable
class Diagnoses(Protocol):
    """A method that can explain its results by numbers of its own."""

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        """Kind of record -> its content.

        Called with the uploads of a task's last round, and once more at the end of the task.
        """


OPTIONAL = {
    protocol.__name__: sorted(name for name in vars(protocol) if not name.startswith("_"))
    for protocol in (Surveys, Distils, Remembers, Concludes, Diagnoses)
}
"""Optional protocol -> the functions that make it up."""
