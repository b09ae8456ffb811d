"""The interface of every method."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar
from weakref import finalize

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, dataclass_options, quirks
from fczoo.core.payload import Payload
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import (
    OPTIONAL,
    Batch,
    Boundary,
    Context,
    EndsTasks,
    Exchange,
    ServerAggregator,
    ServerContext,
    Task,
)


def _require_query(predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``predict``: it raises FczooError if the batch lacks features that it reads."""

    @wraps(predict)
    def predict_or_raise(
        self: "Method", backbone: Backbone, state: Tree, batch: Batch, task: Task
    ) -> Tensor:
        try:
            return predict(self, backbone, state, batch, task)
        except RuntimeError as error:  # of shapes; some methods ask for features in training only
            if batch.query.shape[-1] or "query" not in self.training().inputs:
                raise
            problem = f"{self.name} predicts from frozen features, but the batch has none"
            advice = "create it with whole_batch(images, labels, backbone(images))"
            raise FczooError(f"{problem}; {advice}") from error

    return predict_or_raise


def _compute_once(training: Callable[..., Training]) -> Callable[..., Training]:
    """Wrap ``training``: each instance computes its declaration once."""
    declarations: dict[int, Training] = {}  # beside the instances, whose fields are the options

    @wraps(training)
    def cached_training(self: "Method") -> Training:
        key = id(self)
        if key not in declarations:
            declarations[key] = training(self)
            finalize(self, declarations.pop, key)
        return declarations[key]

    return cached_training


@dataclass(frozen=True)
class Method(ABC):
    """A frozen dataclass of hyper-parameters plus pure functions over trees of tensors.

    A method defines the loss of one client on one batch, the upload of a client and how the server
    merges the uploads. Loops, devices, optimizers, loaders and logs belong to the engine.

    State is split by the prefixes of its names: those in ``training().optims`` are trained by the
    clients and uploaded, those in ``server_only`` never leave the server, everything else is
    broadcast read-only.

    In the order of a run, with the side that runs each function:

    ========================  ======  =====================================================
    ``training()``            both    declares what clients train, on what, what they upload
    ``begin_task``            server  state of the last task (empty at first) -> new state
    ``collect``               client  sums over a batch, before the rounds ("task_start")
    ``update_from``           server  state and these sums -> state
    ``before_training``       client  its memory at the start of a round
    ``teacher_outputs``       client  outputs of the teacher for a batch
    ``loss``                  client  scalar loss of a batch, and sums over the round
    ``collect``               client  sums over a batch after training ("after_training")
    ``make_upload``           client  trained tensors and sums -> upload
    ``after_training``        client  its memory after a round, and more to upload
    ``aggregate``             server  uploads of the round -> one tree
    ``server_update``         server  state and this tree -> state
    ``collect``               client  sums over a batch ("before_exemplars")
    ``update_from``           server  state and these sums -> state
    ``end_task_client``       client  its memory after the last round, and sums to upload
    ``update_from``           server  state and these sums -> state ("after_rounds")
    ``loss``                  client  one more round on exemplars, with ``Training.balanced``
    ``collect``               client  sums over a batch, exemplars included ("task_end")
    ``update_from``           server  state and these sums -> state
    ``predict``               server  logits of test images over all classes seen so far
    ``diagnose``              server  numbers that explain the results (``--diagnostics``)
    ========================  ======  =====================================================

    ``Training.collect_at`` lists the phases of ``collect``. Functions that only some methods need
    belong to the protocols ``HasClientMemory``, ``HasTeacher``, ``EndsTasks`` and ``Diagnoses``; a
    method defines all of a protocol or none.

    A complete method::

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
    title: ClassVar[str] = ""  # as its paper writes it; empty: the name of the class
    paper: ClassVar[str] = ""
    # Markdown with LaTeX between dollars, for its page in the handbook
    formulas: ClassVar[str] = ""
    server_only: ClassVar[tuple[str, ...]] = ()  # state prefixes that never leave the server
    # state prefixes with one row per finished task: rows are appended and never change
    append_only: ClassVar[tuple[str, ...]] = ()
    # whether labels may return in a later task (--tasks domains, --moving): the server then adds to
    # the sums of a class, and clients collect only over images that no earlier sums count
    supports_recurring_classes: ClassVar[bool] = False
    # data set -> hyper-parameters that differ there
    dataset_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init_subclass__(cls) -> None:
        """Raise TypeError for an incomplete optional protocol and for old names."""
        super().__init_subclass__()
        if old_names := [
            f"{old} is now {OLD_MEMBER_NAMES[old]}" for old in vars(cls) if old in OLD_MEMBER_NAMES
        ]:
            raise TypeError(f"{cls.__name__} uses old names of fczoo: {', '.join(old_names)}")
        if "predict" in vars(cls):
            cls.predict = _require_query(vars(cls)["predict"])  # type: ignore[method-assign]
        if "training" in vars(cls):
            cls.training = _compute_once(vars(cls)["training"])  # type: ignore[method-assign]
        for protocol, members in OPTIONAL.items():
            missing = [f"{name}()" for name in members if not hasattr(cls, name)]
            definitions = [f"{name}()" for name in members if hasattr(cls, name)]
            if definitions and missing:
                raise TypeError(
                    f"{cls.__name__} defines {', '.join(definitions)} but not "
                    f"{', '.join(missing)}: {protocol} needs them all"
                )

    def __post_init__(self) -> None:
        check_options(self)

    # --- required

    @abstractmethod
    def training(self) -> Training:
        """Declare what clients train, on which data, and what they upload.

        fczoo calls it once per instance: the declaration depends on the hyper-parameters only.
        """

    @abstractmethod
    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Return the server's state for a new task.

        Args:
            state: State after the last task; empty at the start of the run.
            task: The new task.
            backbone: Frozen backbone.
            rng: Generator for new tensors.
        """

    @abstractmethod
    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        """Return logits over the classes seen so far, [B, task.stop], or scores.

        Args:
            backbone: Frozen backbone.
            state: The server's state.
            batch: Test images.
            task: The current task.
        """

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Return the features [B, D] that ``predict`` uses; by default frozen features.

        Args:
            backbone: Frozen backbone.
            tree: The server's state, or a client's trained tensors.
            batch: Images.
        """
        return batch.query if batch.query.shape[-1] else backbone(batch.x)

    # --- client

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        """Compute the loss of one client on a batch.

        Args:
            backbone: Frozen backbone.
            train: The client's trained tensors.
            batch: Training images.
            ctx: Position in the run and the server's broadcast.

        Returns:
            A scalar loss, and sums that the engine accumulates over the steps of the round.
        """
        raise TypeError(f"{type(self).__name__} trains something but does not define loss()")

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        """Compute sums over a batch, in one pass over the local data without gradients.

        Sums of ``after_training`` go to ``make_upload``, those at a task boundary to
        ``update_from``.

        Args:
            phase: Phase of the task, one of ``Training.collect_at``.
            backbone: Frozen backbone.
            tree: The client's trained tensors after training; at a task boundary the server's
                broadcast.
            batch: Images of the client.
            ctx: Position in the run and the server's broadcast.
        """
        raise TypeError(f"{type(self).__name__} collects at {phase} but does not define collect()")

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        """Return the upload.

        Args:
            train: The client's trained tensors.
            sums: Sums of ``loss`` and of ``collect`` after training.
            ctx: Position in the run and the server's broadcast.
        """
        return {**train, **sums}

    # --- server

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """Merge the uploads of a round.

        Args:
            payloads: One upload per participant.
            average: Aggregator for the tensors that are averaged.
        """
        return average(payloads)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Return the state with the merged uploads.

        Args:
            state: The server's state.
            merged: Result of ``aggregate``.
            ctx: Position in the run, numbers of clients and images.
        """
        return {**state, **merged}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Return the state with the clients' sums at a task boundary.

        Args:
            phase: Boundary of the task: that of ``collect``, or ``after_rounds`` for the sums of
                ``end_task_client``.
            state: The server's state.
            sums: Sums over all clients that sent some, or stacked [K, ...] with
                ``Training.per_client_statistics``.
            ctx: Position in the run, numbers of clients and images.
        """
        raise TypeError(
            f"{type(self).__name__} uploads sums at {phase} but does not define update_from()"
        )


def table_note(method: Method) -> str:
    """Return the note under every table of a method's results.

    It consists of ``Training.table_note`` and the options that follow released code.

    Args:
        method: Method with its options.
    """
    deviations = ", ".join(
        f"{name}={getattr(method, name)}"
        for name, value, *_ in quirks(dataclass_options(type(method)))
        if getattr(method, name) == value
    )
    as_released = f"with {deviations}, as in released code" if deviations else ""
    return "; ".join(filter(None, [method.training().table_note, as_released]))


OLD_MEMBER_NAMES = {
    "survey": "collect",
    "absorb": "update_from",
    "surveys": "Training.collect_at",
    "collect_phases": "Training.collect_at",
    "stats": "collect",
    "statistics": "collect",
    "pack": "make_upload",
    "prepare": "before_training",
    "finish": "after_training",
    "teach": "teacher_outputs",
    "conclude": "end_task_client",
    "concluded": "update_from",
    "end_task_server": "update_from",
    "remark": "Training.table_note",
    "table_note": "Training.table_note",
    "tuned": "dataset_options",
    "returning": "supports_recurring_classes",
    "private": "server_only",
    "frozen": "append_only",
}
"""Old names of members of methods -> today's member, or field of ``Training``."""


def task_exchanges(method: Method, task: Task, rounds: int) -> Iterator[Exchange]:
    """Yield the exchanges of one task between server and clients, in their order.

    Only this function defines the order: runs, sites, the upload probe and the conformance kit
    iterate over it.

    Args:
        method: The method that is trained.
        task: The task to learn.
        rounds: Rounds of training per task; a task in which the method trains nothing has none.
    """
    training = method.training()
    if training.collects_at("task_start", task):
        yield Exchange(task, boundary="task_start")
    rounds = rounds if training.active_optims(task, 0) else 0
    for number in range(rounds):
        yield Exchange(task, number)
    if training.collects_at("before_exemplars", task):
        yield Exchange(task, boundary="before_exemplars")
    if isinstance(method, EndsTasks):
        yield Exchange(task, boundary="after_rounds")
    if training.balanced and task.index:
        yield Exchange(task, rounds, balanced=True)
    if training.collects_at("task_end", task):
        yield Exchange(task, boundary="task_end")
