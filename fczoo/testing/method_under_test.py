"""A method under test and its recorded runs in the toy benchmark, which checks share.

A record contains what every client received and uploaded, and all evaluated states.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, Task
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.result import Result
from fczoo.federation.run import FederatedRun
from fczoo.federation.server import Server
from fczoo.testing.toy_benchmark import need, toy_bench

SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 8}
"""Settings of a short run: two rounds, with one or two steps per client."""


@dataclass
class Call:
    """Record of one round or collection of statistics; trees are copies unless noted otherwise."""

    # a round, or a boundary of the task
    phase: Literal["train", "balanced"] | Boundary
    engine: ClientEngine
    state: Tree  # broadcast state before the call
    state_after: Tree  # broadcast state after the call
    clients: list[Client]
    ctx: Context
    payloads: list[Payload]
    memories: dict[int, Tree]  # client memories before the call, by number of the client
    live_memories: dict[int, Tree]  # the same memories as original tensors, not copies
    live_uploads: list[Payload]  # the original uploads, not copies, which the server uses later
    server_state: Tree  # server state before the call, with its private tensors


@dataclass
class Record:
    """Record of one run: its calls and evaluated states."""

    method: Method
    bench: Benchmark
    result: Result
    calls: list[Call] = field(default_factory=list)
    states: dict[int, Tree] = field(default_factory=dict)  # state after each task, by its index

    @property
    def rounds(self) -> list[Call]:
        """Return the calls of training rounds."""
        return [call for call in self.calls if call.phase in ("train", "balanced")]

    @property
    def last_calls(self) -> dict[str, Call]:
        """Return the last call of each phase."""
        return {call.phase: call for call in self.calls}


def copy_tree(tree: Tree) -> Tree:
    """Copy a tree into new memory.

    Args:
        tree: Tensors by name.

    Returns:
        Detached copies.
    """
    return {k: v.detach().clone() for k, v in tree.items()}


def record_run(
    bench: Benchmark,
    method: Method,
    seed: int = 0,
    on_call: Callable[[Call], None] = lambda call: None,
) -> Record:
    """Run a method and record every call of the engine and every evaluated state.

    Args:
        bench: Benchmark of the run.
        method: Method to run.
        seed: Seed of the run.
        on_call: Called after each call of the engine; it may end the run by an exception.

    Returns:
        Record of the run.
    """
    calls: list[Call] = []
    states: dict[int, Tree] = {}
    server_states: list[Tree] = []  # state at the latest broadcast
    send = Server.send
    train, collect, end_task, predict = (
        ClientEngine.train,
        ClientEngine.collect,
        ClientEngine.end_task_client,
        type(method).predict,
    )

    def record_call(
        phase: Literal["train", "balanced"] | Boundary,
        engine: ClientEngine,
        state: Tree,
        clients: list[Client],
        ctx: Context,
        work: Callable[[], list[Payload]],
    ) -> list[Payload]:
        state_before, live_memories = copy_tree(state), dict(engine.memories)
        memories = {c: copy_tree(m) for c, m in live_memories.items()}
        live_uploads = work()
        payloads = [payload.holding(copy_tree(payload.tensors)) for payload in live_uploads]
        state_after, client_list = copy_tree(state), list(clients)
        call = Call(
            phase,
            engine,
            state_before,
            state_after,
            client_list,
            ctx,
            payloads,
            memories,
            live_memories,
            live_uploads,
            copy_tree(server_states[-1]),
        )
        calls.append(call)
        on_call(call)
        return live_uploads

    def record_send(self: Server, clients: Sequence[Client]) -> tuple[Tree, dict[int, int]]:
        server_states[:] = [self.state]
        return send(self, clients)

    def record_train(
        self: ClientEngine, state: Tree, clients: list[Client], ctx: Context, *rest: Any
    ) -> list[Payload]:
        phase: Literal["train", "balanced"] = "balanced" if ctx.balanced else "train"
        return record_call(
            phase, self, state, clients, ctx, lambda: train(self, state, clients, ctx, *rest)
        )

    def record_collect(
        self: ClientEngine, phase: Boundary, state: Tree, clients: list[Client], ctx: Context
    ) -> list[Payload]:
        def work() -> list[Payload]:
            return list(collect(self, phase, state, clients, ctx))

        return record_call(phase, self, state, clients, ctx, work)

    def record_end_task(self: ClientEngine, clients: list[Client], ctx: Context) -> list[Payload]:
        return record_call(
            "after_rounds", self, ctx.shared, clients, ctx, lambda: end_task(self, clients, ctx)
        )

    def record_predict(
        self: Method, backbone: Backbone, state: Tree, batch: Batch, task: Task
    ) -> Tensor:
        states[task.index] = copy_tree(state)
        return predict(self, backbone, state, batch, task)

    with (
        mock.patch.object(Server, "send", record_send),
        mock.patch.object(ClientEngine, "train", record_train),
        mock.patch.object(ClientEngine, "collect", record_collect),
        mock.patch.object(ClientEngine, "end_task_client", record_end_task),
        mock.patch.object(type(method), "predict", record_predict),
    ):
        result = bench.run(method, seed)
    # the states were copied in inference mode; a clone outside of it is an ordinary tensor
    return Record(method, bench, result, calls, {t: copy_tree(s) for t, s in states.items()})


class _FirstCall(Exception):
    """Exception that ends a run after its first call."""


@dataclass
class MethodUnderTest:
    """A method and its recorded runs in the toy benchmark."""

    method: Method
    runs: dict[tuple[torch.dtype, int, int], Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the method's registered name, the first word of messages."""
        return self.method.name

    def run(self, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0) -> Record:
        """Return a recorded run; the first call executes it.

        Args:
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.
            seed: Seed of the run.

        Returns:
            Record of the run.

        Raises:
            AssertionError: The method does not finish the run.
        """
        key = (dtype, together, seed)
        if key not in self.runs:
            with self._in_toy_benchmark():
                bench = toy_bench(dtype, together=together, **SHORT)
                self.runs[key] = record_run(bench, self.method, seed)
        return self.runs[key]

    def start(
        self,
        tasks: int,
        dtype: torch.dtype = torch.float64,
        together: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> FederatedRun:
        """Start a run that is not recorded, and learn its first tasks.

        Args:
            tasks: Number of tasks.
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.
            seed: Seed of the run.
            settings: Fields of ``Settings`` that replace those of ``SHORT``.

        Returns:
            A new run after these tasks.

        Raises:
            AssertionError: The method does not finish these tasks.
        """
        with self._in_toy_benchmark():
            bench = toy_bench(dtype, **{**SHORT, "together": together, **settings})
            run = bench.start(self.method, seed)
            deque(islice(run, tasks), maxlen=0)
        return run

    def first_uploads(self, dtype: torch.dtype, together: int) -> list[Payload]:
        """Return the uploads of the first call in a run with more steps than ``SHORT``.

        Args:
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.

        Returns:
            Uploads of the first round or collection of statistics; the run ends there.

        Raises:
            AssertionError: The method fails before its first upload.
        """
        calls: list[Call] = []

        def stop(call: Call) -> None:
            calls.append(call)
            raise _FirstCall

        with self._in_toy_benchmark(), suppress(_FirstCall):
            bench = toy_bench(dtype, together=together, batch_size=8)
            record_run(bench, self.method, on_call=stop)
        return calls[0].payloads

    @contextmanager
    def _in_toy_benchmark(self) -> Iterator[None]:
        """Convert an error of a run to an AssertionError."""
        try:
            yield
        except (FczooError, TypeError) as error:
            raise AssertionError(f"{self.name} fails in the toy benchmark: {error}") from error

    def logits(
        self, record: Record, task: int, index: Tensor | None = None, batch_size: int = 100
    ) -> Tensor:
        """Compute the logits of test images with the state after a task.

        Args:
            record: Run whose state is used.
            task: Index of the task.
            index: Positions [N] of test images. None: all.
            batch_size: Images per call of ``predict``.

        Returns:
            Logits [N, task.stop].
        """
        store = record.bench.test
        rows = torch.arange(len(store.labels)) if index is None else index
        evaluated_task, state = record.bench.stream.tasks[task], record.states[task]
        batches = (batch_of(self.method, store, part) for part in rows.split(batch_size))
        return torch.cat(
            [self.method.predict(store.backbone, state, batch, evaluated_task) for batch in batches]
        )

    def answers(self, record: Record, task: int) -> Tensor:
        """Predict the classes of all test images after a task.

        Args:
            record: Run whose state is used.
            task: Index of the task.

        Returns:
            Classes [K, N] of the global model (K = 1), or of K clients' own models, each among the
            classes that its client has had.
        """
        if not self.method.training().own_models:
            return self.logits(record, task).argmax(1)[None]
        run, evaluated_task = self.start(task + 1), record.bench.stream.tasks[task]
        batch = batch_of(
            self.method, run.scenario.test, torch.arange(len(run.scenario.test.labels))
        )
        answers = []
        for client, model in run.own_models.items():
            logits = self.method.predict(run.backbone, model, batch, evaluated_task)
            unknown = ~run.scenario.classes_of(client, evaluated_task)
            answers.append(logits.masked_fill(unknown, -torch.inf).argmax(1))
        return torch.stack(answers)


def batch_of(method: Method, store: ImageStore, index: Tensor) -> Batch:
    """Load the test view of some images in one batch, with the inputs of ``method``.

    Args:
        method: Method, which declares its inputs.
        store: Images.
        index: Positions of images [B].

    Returns:
        The batch.
    """
    (batch,) = view_batches(method, store, index, len(index))
    return batch


def models_of(run: FederatedRun) -> Tree:
    """Return the state of a run; with own models, those of all clients with prefixed names.

    Args:
        run: Run after some task.
    """
    return {
        name if client is None else f"client {client} {name}": value
        for client, model in run.models.items()
        for name, value in model.items()
    }


def need_same(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    sentence: str,
    tolerance: float = 0.0,
) -> None:
    """Raise AssertionError if two trees differ in names or values.

    Args:
        actual: Tensors by name.
        expected: Tensors that must be equal.
        sentence: Start of the message, which ends with the name of the tensor.
        tolerance: Largest relative and absolute difference; 0: bit for bit.

    Raises:
        AssertionError: The trees differ.
    """
    unmatched_names = actual.keys() ^ expected.keys()
    need(
        not unmatched_names,
        f"{sentence} (only one of the two has {', '.join(sorted(unmatched_names))})",
    )
    for name, value in actual.items():
        try:
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
        except AssertionError:
            raise AssertionError(f"{sentence} ({name} differs)") from None
