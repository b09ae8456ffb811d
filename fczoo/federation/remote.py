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

from fczoo.core.files import null_to_nan
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Task
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState, pack, unpack
from fczoo.federation.client import ClientRequest, ClientResponse, ClientRuntime
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import deterministic_operations, plan_of
from fczoo.federation.local_trainer import LocalTrainer
from fczoo.federation.scenario import Scenario

QUESTION, GROUP, ANSWER = "fczoo-question-1", "fczoo-group-2", "fczoo-answer-1"


Transport = Callable[[bytes, Iterable[bytes], int], Iterator[bytes]]
"""The way to workers that answer for clients: a function of a request, groups of clients, and
their number. It yields the responses of the groups in their order.
"""


@dataclass(frozen=True, kw_only=True)
class RemoteEngine(ClientEngine):
    """An engine of remote clients; it stores their state between exchanges."""

    transport: Transport

    def _responses(
        self, request: ClientRequest, groups: Sequence[Sequence[Client]]
    ) -> Iterator[ClientResponse]:
        messages = (_group(clients, self._client_state_of(request, clients)) for clients in groups)
        for response in self.transport(pack_request(request), messages, len(groups)):
            yield self._read(response)

    def _read(self, content: bytes) -> ClientResponse:
        trees, notes = unpack(ANSWER, content, self.backbone.device)
        payloads = [Payload(trees[f"payload.{c}"], c, images) for c, images in notes["payloads"]]
        means = {client: null_to_nan(mean) for client, mean in notes["losses"]}
        losses = {client: (mean, trees["losses"][str(client)]) for client, mean in means.items()}
        return ClientResponse(payloads, ClientState.from_trees(trees), losses)


class RemoteWorker:
    """Worker that responds for the clients of one run."""

    def __init__(self, scenario: Scenario, method: Method, seed: int):
        self.scenario, self.settings = scenario, scenario.settings
        uplink = scenario.uplink(method, seed)
        store = uplink.attackers.store(scenario.stream, scenario.partition, scenario.train)
        plan = plan_of(
            scenario.settings, seed, scenario.backbone.device, scenario.partition.clients, 0
        )
        self.trainer = LocalTrainer(method, scenario.backbone, store, plan, uplink.rule)
        self.runtime = ClientRuntime(self.trainer, uplink)

    def unpack_request(self, question: bytes) -> ClientRequest:
        """Deserialize a request.

        Raises ValueError for invalid bytes.
        """
        return unpack_request(question, self.trainer.backbone.device)[0]

    def answer(self, request: ClientRequest, group: bytes) -> bytes:
        """Return the response of a group of clients to a request.

        Raises ValueError for invalid bytes.
        """
        trees, notes = unpack(GROUP, group, self.trainer.backbone.device)
        index, task_and_scope = (
            trees["index"],
            (request.ctx.task, self.trainer.method.training().data_scope),
        )
        clients = [
            Client(k, index[str(k)], partial(self.scenario.earlier, k, *task_and_scope))
            for k in notes["clients"]
        ]
        with deterministic_operations(self.settings.deterministic):
            response = self.runtime.answer(request, clients, ClientState.from_trees(trees))
        payloads = {f"payload.{p.client}": p.tensors for p in response.payloads}
        steps = {str(client): losses for client, (_, losses) in response.losses.items()}
        about = {
            "payloads": [(p.client, p.num_samples) for p in response.payloads],
            "losses": [(client, mean) for client, (mean, _) in response.losses.items()],
        }
        return pack(
            ANSWER, {**payloads, **response.client_state.to_trees(), "losses": steps}, about
        )


def pack_request(request: ClientRequest, **more: Any) -> bytes:
    """Serialize a request with the state that the clients receive; ``more`` are plain values."""
    ctx = request.ctx
    position = {"task": ctx.task.record, "round": ctx.round, "rounds": ctx.rounds}
    notes = {"boundary": request.boundary, **position, **more}
    return pack(QUESTION, {"state": request.state, "control": request.control}, notes)


def unpack_request(question: bytes, device: torch.device) -> tuple[ClientRequest, dict[str, Any]]:
    """Deserialize a request and its plain values.

    Raises ValueError for invalid bytes.
    """
    trees, notes = unpack(QUESTION, question, device)
    ctx = Context(Task.of_record(notes["task"]), notes["round"], notes["rounds"], trees["state"])
    return ClientRequest(notes["boundary"], trees["state"], trees["control"], ctx), notes


def _group(clients: Sequence[Client], client_state: ClientState) -> bytes:
    index: Tree = {str(client.number): client.index for client in clients}
    notes = {"clients": [client.number for client in clients]}
    return pack(GROUP, {**client_state.to_trees(), "index": index}, notes)
