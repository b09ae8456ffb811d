"""Remote clients: requests and responses as bytes.

``RemoteEngine`` runs at the server, and ``RemoteWorker`` at the other end of a ``Transport``. The
worker is stateless: the request and the response carry the state of the clients. So any worker can
respond for any client, and gives the same response in place of a worker that has died.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fczoo.core.files import null_as_nan
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Task
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState, kept_in, kept_trees, pack, unpack
from fczoo.federation.client import ClientRequest, ClientResponse, ClientRuntime
from fczoo.federation.device import plan_of, reproducible
from fczoo.federation.engine import ClientEngine
from fczoo.federation.local_trainer import make_optimizers
from fczoo.federation.world import World

QUESTION, GROUP, ANSWER = "fczoo-question-1", "fczoo-group-2", "fczoo-answer-1"


Transport = Callable[[bytes, Iterable[bytes], int], Iterator[bytes]]
"""The way to workers that answer for clients: a function of a request, groups of clients, and
their number. It yields the responses of the groups in their order.
"""


@dataclass(frozen=True, kw_only=True)
class RemoteEngine(ClientEngine):
    """An engine of remote clients; it stores their state between exchanges."""

    transport: Transport

    def _answers(
        self, request: ClientRequest, groups: Sequence[Sequence[Client]]
    ) -> Iterator[ClientResponse]:
        messages = (_group(clients, self._kept_by(request, clients)) for clients in groups)
        for answer in self.transport(question_of(request), messages, len(groups)):
            yield self._read(answer)

    def _read(self, content: bytes) -> ClientResponse:
        trees, notes = unpack(ANSWER, content, self.backbone.device)
        payloads = [Payload(trees[f"payload.{c}"], c, images) for c, images in notes["payloads"]]
        means = {client: null_as_nan(mean) for client, mean in notes["losses"]}
        losses = {client: (mean, trees["losses"][str(client)]) for client, mean in means.items()}
        return ClientResponse(payloads, kept_in(trees), losses)


class RemoteWorker:
    """Worker that responds for the clients of one run."""

    def __init__(self, world: World, method: Method, seed: int):
        self.world, self.settings = world, world.settings
        uplink = world.uplink(method, seed)
        store = uplink.attackers.store(world.stream, world.partition, world.train)
        plan = plan_of(world.settings, seed, world.backbone.device, world.partition.clients, 0)
        parts = method, world.backbone, store, plan
        self.side = ClientRuntime(*parts, uplink.rule, make_optimizers, uplink)

    def read_request(self, question: bytes) -> ClientRequest:
        """Deserialize a request.

        Raises ValueError for invalid bytes.
        """
        return asked_in(question, self.side.backbone.device)[0]

    def answer(self, request: ClientRequest, group: bytes) -> bytes:
        """Return the response of a group of clients to a request.

        Raises ValueError for invalid bytes.
        """
        trees, notes = unpack(GROUP, group, self.side.backbone.device)
        index, task_and_scope = (
            trees["index"],
            (request.ctx.task, self.side.method.training().data_scope),
        )
        clients = [
            Client(k, index[str(k)], partial(self.world.earlier, k, *task_and_scope))
            for k in notes["clients"]
        ]
        with reproducible(self.settings.deterministic):
            answer = self.side.answer(request, clients, kept_in(trees))
        payloads = {f"payload.{p.client}": p.tensors for p in answer.payloads}
        steps = {str(client): losses for client, (_, losses) in answer.losses.items()}
        about = {
            "payloads": [(p.client, p.num_samples) for p in answer.payloads],
            "losses": [(client, mean) for client, (mean, _) in answer.losses.items()],
        }
        return pack(ANSWER, {**payloads, **kept_trees(answer.kept), "losses": steps}, about)


def question_of(request: ClientRequest, **more: Any) -> bytes:
    """Serialize a request with the state that the clients receive; ``more`` are plain values."""
    ctx = request.ctx
    position = {"task": ctx.task.record, "round": ctx.round, "rounds": ctx.rounds}
    notes = {"boundary": request.boundary, **position, **more}
    return pack(QUESTION, {"state": request.state, "control": request.control}, notes)


def asked_in(question: bytes, device: torch.device) -> tuple[ClientRequest, dict[str, Any]]:
    """Deserialize a request and its plain values.

    Raises ValueError for invalid bytes.
    """
    trees, notes = unpack(QUESTION, question, device)
    ctx = Context(Task.of_record(notes["task"]), notes["round"], notes["rounds"], trees["state"])
    return ClientRequest(notes["boundary"], trees["state"], trees["control"], ctx), notes


def _group(clients: Sequence[Client], kept: ClientState) -> bytes:
    index: Tree = {str(client.number): client.index for client in clients}
    notes = {"clients": [client.number for client in clients]}
    return pack(GROUP, {**kept_trees(kept), "index": index}, notes)
