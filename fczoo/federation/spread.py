"""Clients that act elsewhere: what they are asked and what they answer, as bytes.

``Spread`` is the server's end, ``Elsewhere`` the way, ``Answering`` the other end. That one keeps nothing
between two exchanges: what clients keep travels with the question and with the answer. So any worker can
answer for any client, and answers the same where another one has died.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch

from fczoo.core.files import null_as_nan
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Task
from fczoo.federation.batches import Client
from fczoo.federation.carried import Kept, kept_in, kept_trees
from fczoo.federation.client_side import Answer, Asked, ClientSide
from fczoo.federation.device import reproducible
from fczoo.federation.engine import Engine
from fczoo.federation.optimizers import Optimizers
from fczoo.federation.plan import plan_of
from fczoo.federation.wire import pack, unpack
from fczoo.federation.world import World

QUESTION, GROUP, ANSWER = "fczoo-question-1", "fczoo-group-2", "fczoo-answer-1"


class Elsewhere(Protocol):
    """The way to those who answer for clients."""

    def __call__(self, question: bytes, groups: Iterable[bytes], count: int, /) -> Iterator[bytes]:
        """The answers of ``count`` groups of clients to one question, in the order of the groups."""


@dataclass(frozen=True, kw_only=True)
class Spread(Engine):
    """An engine whose clients act elsewhere; what they keep is with it between exchanges."""

    elsewhere: Elsewhere

    def _answers(self, asked: Asked, groups: Sequence[Sequence[Client]]) -> Iterator[Answer]:
        held = (_group(clients, self._kept_by(asked, clients)) for clients in groups)
        for answer in self.elsewhere(question_of(asked), held, len(groups)):
            yield self._read(answer)

    def _read(self, content: bytes) -> Answer:
        trees, notes = unpack(ANSWER, content, self.backbone.device)
        payloads = [Payload(trees[f"payload.{c}"], c, images) for c, images in notes["payloads"]]
        means = {client: null_as_nan(mean) for client, mean in notes["losses"]}
        losses = {client: (mean, trees["losses"][str(client)]) for client, mean in means.items()}
        return Answer(payloads, kept_in(trees), losses)


class Answering:
    """Answers for the clients of one run."""

    def __init__(self, world: World, method: Method, seed: int):
        self.world, self.settings = world, world.settings
        self.uplink = world.uplink(method, seed)
        store = self.uplink.attackers.store(world.stream, world.partition, world.train)
        plan = plan_of(world.settings, seed, world.backbone.device, world.partition.clients, 0)
        self.side = ClientSide(method, world.backbone, store, plan, self.uplink.rule, Optimizers)

    def heard(self, question: bytes) -> Asked:
        """What is asked. Raises ValueError for bytes that are damaged or no question."""
        return asked_in(question, self.side.backbone.device)[0]

    def answer(self, asked: Asked, group: bytes) -> bytes:
        """What a group of clients answers. Raises ValueError for bytes that are damaged or no group."""
        trees, notes = unpack(GROUP, group, self.side.backbone.device)
        index, known = trees["index"], (asked.ctx.task, self.side.method.training().scope)
        clients = [Client(k, index[str(k)], partial(self.world.earlier, k, *known)) for k in notes["clients"]]
        with reproducible(self.settings.deterministic):
            answer = self.side.answer(asked, clients, kept_in(trees))
        payloads = {f"payload.{p.client}": p.tensors for p in answer.payloads}
        steps = {str(client): losses for client, (_, losses) in answer.losses.items()}
        about = {
            "payloads": [(p.client, p.num_samples) for p in answer.payloads],
            "losses": [(client, mean) for client, (mean, _) in answer.losses.items()],
        }
        return pack(ANSWER, {**payloads, **kept_trees(answer.kept), "losses": steps}, about)


def question_of(asked: Asked, **more: Any) -> bytes:
    """A question whose state is all that the clients know of the server; ``more`` are plain values."""
    ctx = asked.ctx
    where = {"task": asdict(ctx.task), "round": ctx.round, "rounds": ctx.rounds}
    notes = {"boundary": asked.boundary, **where, **more}
    return pack(QUESTION, {"state": asked.state, "control": asked.control}, notes)


def asked_in(question: bytes, device: torch.device) -> tuple[Asked, dict[str, Any]]:
    """What is asked, and all plain values of the question. Raises ValueError for bytes that are none."""
    trees, notes = unpack(QUESTION, question, device)
    ctx = Context(Task(**notes["task"]), notes["round"], notes["rounds"], trees["state"])
    return Asked(notes["boundary"], trees["state"], trees["control"], ctx), notes


def _group(clients: Sequence[Client], kept: Kept) -> bytes:
    index: Tree = {str(client.number): client.index for client in clients}
    notes = {"clients": [client.number for client in clients]}
    return pack(GROUP, {**kept_trees(kept), "index": index}, notes)
