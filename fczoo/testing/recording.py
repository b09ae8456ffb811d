"""Watched runs: what every client received and uploaded, and the states that were evaluated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, Moment, Task
from fczoo.federation.batches import Client
from fczoo.federation.benchmark import Bench
from fczoo.federation.engine import Engine
from fczoo.federation.result import Result


@dataclass
class Call:
    """One round or survey, as clients saw it. Trees are copies."""

    moment: Literal["train", "balanced"] | Boundary  # a round, or what happens at a boundary of the task
    engine: Engine
    state: Tree  # what the clients got
    after: Tree  # the same once they are done
    clients: list[Client]
    ctx: Context
    payloads: list[Payload]
    memories: dict[int, Tree]  # what the clients remembered before
    remembered: dict[int, Tree]  # those very tensors, once the clients are done
    kept: list[Payload]  # the payloads' very tensors, which the server has used by the end of the run


@dataclass
class Record:
    """What went over the wire in one run, and the states that were evaluated."""

    method: Method
    bench: Bench
    result: Result
    calls: list[Call] = field(default_factory=list)
    states: dict[int, Tree] = field(default_factory=dict)  # task -> state after it

    @property
    def rounds(self) -> list[Call]:
        """The calls that trained."""
        return [call for call in self.calls if call.moment in ("train", "balanced")]

    @property
    def last_calls(self) -> dict[str, Call]:
        """The last call of each moment."""
        return {call.moment: call for call in self.calls}


def copied(tree: Tree) -> Tree:
    """A copy that shares no memory."""
    return {k: v.detach().clone() for k, v in tree.items()}


def watch(bench: Bench, method: Method, seed: int = 0) -> Record:
    """Run ``method`` and note every use of the engine and every evaluated state."""
    calls: list[Call] = []
    states: dict[int, Tree] = {}
    train, survey, conclude, predict = (
        Engine.train,
        Engine.survey,
        Engine.conclude,
        type(method).predict,
    )

    def noted(
        moment: Literal["train", "balanced"] | Boundary,
        engine: Engine,
        state: Tree,
        clients: list[Client],
        ctx: Context,
        work: Callable[[], list[Payload]],
    ) -> list[Payload]:
        before, remembered = copied(state), dict(engine.memories)
        memories = {c: copied(m) for c, m in remembered.items()}
        kept = work()
        payloads = [payload.holding(copied(payload.tensors)) for payload in kept]
        after, asked = copied(state), list(clients)
        calls.append(Call(moment, engine, before, after, asked, ctx, payloads, memories, remembered, kept))
        return kept

    def noted_train(
        self: Engine, state: Tree, clients: list[Client], ctx: Context, *rest: Any
    ) -> list[Payload]:
        moment: Literal["train", "balanced"] = "balanced" if ctx.balanced else "train"
        return noted(moment, self, state, clients, ctx, lambda: train(self, state, clients, ctx, *rest))

    def noted_survey(
        self: Engine, moment: Moment, state: Tree, clients: list[Client], ctx: Context
    ) -> list[Payload]:
        def work() -> list[Payload]:
            return list(survey(self, moment, state, clients, ctx))

        return noted(moment, self, state, clients, ctx, work)

    def noted_conclude(self: Engine, clients: list[Client], ctx: Context) -> list[Payload]:
        return noted("conclude", self, ctx.shared, clients, ctx, lambda: conclude(self, clients, ctx))

    def noted_predict(self: Method, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        states[task.index] = copied(state)
        return predict(self, backbone, state, batch, task)

    with (
        mock.patch.object(Engine, "train", noted_train),
        mock.patch.object(Engine, "survey", noted_survey),
        mock.patch.object(Engine, "conclude", noted_conclude),
        mock.patch.object(type(method), "predict", noted_predict),
    ):
        result = bench.run(method, seed)
    # what predict saw was copied in inference mode; a clone outside of it is an ordinary tensor
    return Record(method, bench, result, calls, {t: copied(s) for t, s in states.items()})
