"""Record runs: what every client received and uploaded, and the states that were evaluated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, Task
from fczoo.federation.batches import Client
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.engine import ClientEngine
from fczoo.federation.result import Result
from fczoo.federation.server import Server


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

    def noted_send(self: Server, clients: Sequence[Client]) -> tuple[Tree, int]:
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
