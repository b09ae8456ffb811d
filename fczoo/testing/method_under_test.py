"""A method under test: its recorded runs in the toy world, each made once.

A record holds what every client received and uploaded, and the states that were evaluated.
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
from fczoo.federation.engine import ClientEngine
from fczoo.federation.result import Result
from fczoo.federation.run import FederatedRun
from fczoo.federation.server import Server
from fczoo.testing.world import need, toy_bench

SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 8}
"""Settings of a run: still two rounds, and one or two steps of a client in each."""


@dataclass
class Call:
    """One round or survey, as clients saw it. Trees are copies unless a comment says otherwise."""

    # a round, or a survey at a boundary of the task
    phase: Literal["train", "balanced"] | Boundary
    engine: ClientEngine
    state: Tree  # broadcast state before the call
    after: Tree  # broadcast state after the call
    clients: list[Client]
    ctx: Context
    payloads: list[Payload]
    memories: dict[int, Tree]  # clients' memories before the call, by number of the client
    remembered: dict[int, Tree]  # the original tensors of these, not copies
    kept: list[Payload]  # the original uploads, not copies, which the server uses later
    server_state: Tree  # the server's state before the call, with its private tensors


@dataclass
class Record:
    """Record of one run: uploads, and states that were evaluated."""

    method: Method
    bench: Benchmark
    result: Result
    calls: list[Call] = field(default_factory=list)
    states: dict[int, Tree] = field(default_factory=dict)  # task -> state after it

    @property
    def rounds(self) -> list[Call]:
        """Return the calls that trained."""
        return [call for call in self.calls if call.phase in ("train", "balanced")]

    @property
    def last_calls(self) -> dict[str, Call]:
        """Return the last call of each phase."""
        return {call.phase: call for call in self.calls}


def copy_tree(tree: Tree) -> Tree:
    """Copy a tree without shared memory.

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
    """Run ``method`` and record every use of the engine and every evaluated state.

    Args:
        bench: Benchmark on which it runs.
        method: Method to run.
        seed: Seed of the run.
        on_call: Called after each use of the engine; an exception that it raises ends the run.

    Returns:
        Record of the run.
    """
    calls: list[Call] = []
    states: dict[int, Tree] = {}
    server_states: list[Tree] = []  # of the last broadcast
    send = Server.send
    train, survey, conclude, predict = (
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
        live_payloads = work()
        payloads = [payload.holding(copy_tree(payload.tensors)) for payload in live_payloads]
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
            live_payloads,
            copy_tree(server_states[-1]),
        )
        calls.append(call)
        on_call(call)
        return live_payloads

    def noted_send(self: Server, clients: Sequence[Client]) -> tuple[Tree, dict[int, int]]:
        server_states[:] = [self.state]
        return send(self, clients)

    def noted_train(
        self: ClientEngine, state: Tree, clients: list[Client], ctx: Context, *rest: Any
    ) -> list[Payload]:
        phase: Literal["train", "balanced"] = "balanced" if ctx.balanced else "train"
        return record_call(
            phase, self, state, clients, ctx, lambda: train(self, state, clients, ctx, *rest)
        )

    def noted_survey(
        self: ClientEngine, phase: Boundary, state: Tree, clients: list[Client], ctx: Context
    ) -> list[Payload]:
        def work() -> list[Payload]:
            return list(survey(self, phase, state, clients, ctx))

        return record_call(phase, self, state, clients, ctx, work)

    def noted_conclude(self: ClientEngine, clients: list[Client], ctx: Context) -> list[Payload]:
        return record_call(
            "after_rounds", self, ctx.shared, clients, ctx, lambda: conclude(self, clients, ctx)
        )

    def noted_predict(
        self: Method, backbone: Backbone, state: Tree, batch: Batch, task: Task
    ) -> Tensor:
        states[task.index] = copy_tree(state)
        return predict(self, backbone, state, batch, task)

    with (
        mock.patch.object(Server, "send", noted_send),
        mock.patch.object(ClientEngine, "train", noted_train),
        mock.patch.object(ClientEngine, "collect", noted_survey),
        mock.patch.object(ClientEngine, "end_task_client", noted_conclude),
        mock.patch.object(type(method), "predict", noted_predict),
    ):
        result = bench.run(method, seed)
    # these copies were made in inference mode; a clone outside of it is an ordinary tensor
    return Record(method, bench, result, calls, {t: copy_tree(s) for t, s in states.items()})


class _FirstCall(Exception):
    """End a run after its first round or survey."""


@dataclass
class MethodUnderTest:
    """A method and its watched runs in the toy world."""

    method: Method
    runs: dict[tuple[torch.dtype, int, int], Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the method's registered name, which starts every message."""
        return self.method.name

    def run(self, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0) -> Record:
        """Return one run, made at the first call.

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
            with self._in_toy_world():
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
        """Learn the first tasks of a run that is not recorded.

        Args:
            tasks: Number of tasks.
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.
            seed: Seed of the run.
            settings: Fields of ``Settings`` that replace those of a run.

        Returns:
            The run, whose ``state`` and ``result`` are as of then; it is a new one at each call.

        Raises:
            AssertionError: The method does not finish these tasks.
        """
        with self._in_toy_world():
            bench = toy_bench(dtype, **{**SHORT, "together": together, **settings})
            run = bench.start(self.method, seed)
            deque(islice(run, tasks), maxlen=0)
        return run

    def first_uploads(self, dtype: torch.dtype, together: int) -> list[Payload]:
        """Return the first uploads of a run with more steps, which show smaller differences.

        Args:
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.

        Returns:
            Uploads of the first round or survey; the run ends there.

        Raises:
            AssertionError: The method does not come to them.
        """
        calls: list[Call] = []

        def stop(call: Call) -> None:
            calls.append(call)
            raise _FirstCall

        with self._in_toy_world(), suppress(_FirstCall):
            record_run(toy_bench(dtype, together=together), self.method, on_call=stop)
        return calls[0].payloads

    @contextmanager
    def _in_toy_world(self) -> Iterator[None]:
        """Turn what a run raises into the sentence of a broken rule."""
        try:
            yield
        except (FczooError, TypeError) as error:
            raise AssertionError(
                f"{self.name} does not finish a run in the toy world: {error}"
            ) from error

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
        """Compute the answers to all test images after a task.

        Args:
            record: Run whose state is used.
            task: Index of the task.

        Returns:
            Classes [K, N] of the global model (K = 1); or of the clients' own models, each among
            the classes that its client has had.
        """
        if not self.method.training().own_models:
            return self.logits(record, task).argmax(1)[None]
        run, evaluated_task = self.start(task + 1), record.bench.stream.tasks[task]
        batch = batch_of(self.method, run.world.test, torch.arange(len(run.world.test.labels)))
        answers = []
        for client, model in run.own_models.items():
            logits = self.method.predict(run.backbone, model, batch, evaluated_task)
            unknown = ~run.world.classes_of(client, evaluated_task)
            answers.append(logits.masked_fill(unknown, -torch.inf).argmax(1))
        return torch.stack(answers)


def batch_of(method: Method, store: ImageStore, index: Tensor) -> Batch:
    """Load the test view of some images in one batch, with the inputs of ``method``.

    Args:
        method: Method that states which inputs it needs.
        store: Images.
        index: Their positions [B].

    Returns:
        The batch.
    """
    (batch,) = view_batches(method, store, index, len(index))
    return batch


def models_of(run: FederatedRun) -> Tree:
    """Return the state of a run, or all clients' models where each client has its own.

    Args:
        run: Run after some task.
    """
    return {
        name if client is None else f"client {client} {name}": value
        for client, model in run.models.items()
        for name, value in model.items()
    }


def need_same(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sentence: str, tolerance: float = 0.0
) -> None:
    """Raise AssertionError where two trees differ in names or values.

    Args:
        ours: Tensors by name.
        theirs: Tensors that must be the same.
        sentence: Start of the message, which ends with the name of the tensor.
        tolerance: Relative and absolute difference that is allowed; 0: bit for bit.

    Raises:
        AssertionError: The trees differ.
    """
    unmatched_names = ours.keys() ^ theirs.keys()
    need(
        not unmatched_names,
        f"{sentence} ({', '.join(sorted(unmatched_names))} is in only one of them)",
    )
    for name, value in ours.items():
        try:
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
        except AssertionError:
            raise AssertionError(f"{sentence} ({name} differs)") from None
