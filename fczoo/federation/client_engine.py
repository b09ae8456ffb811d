"""All clients of a run: their groups in training, and their state between exchanges."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Boundary, Context, HasClientMemory
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState
from fczoo.federation.client import ClientRequest, ClientResponse, ClientRuntime
from fczoo.federation.device import Plan
from fczoo.federation.local_rules import ControlVariates
from fczoo.federation.local_trainer import LocalTrainer, MakeOptimizers, make_optimizers
from fczoo.federation.uplink import Uplink
from fczoo.federation.waiting_uploads import move_upload

ProgressCallback = Callable[[int, float, Tensor], None]
"""Called with a client's number, its mean loss and those of its steps [n] when its training ends.
"""


@dataclass(frozen=True)
class ClientEngine:
    """Engine that runs the clients of one task and stores their state between exchanges."""

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    memories: dict[int, Tree] = field(
        default_factory=dict
    )  # client -> what it keeps from round to round
    teacher_outputs: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # see ClientState
    controls: ControlVariates = field(
        default_factory=ControlVariates
    )  # of the rule of local training, if any
    residuals: dict[int, Tree] = field(default_factory=dict)  # see ClientState
    make_optimizers: MakeOptimizers = make_optimizers
    uplink: Uplink | None = None  # see ClientRuntime

    @property
    def trainer(self) -> LocalTrainer:
        """Return the trainer of the clients."""
        parts = self.method, self.backbone, self.store, self.plan
        return LocalTrainer(*parts, self.controls.rule, self.make_optimizers)

    @property
    def runtime(self) -> ClientRuntime:
        """Return the runtime of the clients."""
        return ClientRuntime(self.trainer, self.uplink)

    @property
    def client_state(self) -> ClientState:
        """Return the state of all clients, for reading and writing."""
        return ClientState(
            self.memories, self.teacher_outputs, self.controls.clients, self.residuals
        )

    def train(
        self,
        state: Tree,
        clients: Sequence[Client],
        ctx: Context,
        report_progress: ProgressCallback = lambda *_: None,
    ) -> list[Payload]:
        """Train ``clients`` and return their uploads in the same order.

        The payload of a client is empty if its loss or weights become infinite or NaN.
        """
        groups = self._groups(clients, ctx)
        request = ClientRequest(None, state, self.controls.shared, ctx)
        payloads: dict[int, Payload] = {}
        responses = self._responses(request, [[clients[i] for i in group] for group in groups])
        for group, response in zip(groups, responses, strict=True):
            self.client_state.update(response.client_state)
            for client, (mean, steps) in response.losses.items():
                report_progress(client, mean, steps)
            uploads = [move_upload(p, self.plan.waiting) for p in response.payloads]
            payloads |= zip(group, uploads, strict=True)
        return [payloads[i] for i in range(len(clients))]

    def collect(
        self, phase: Boundary, state: Tree, clients: Sequence[Client], ctx: Context
    ) -> Iterator[Payload]:
        """Yield the statistics of each client from one pass over its data, on demand."""
        for response in self._responses(
            self._statistics_request(phase, state, ctx), [[client] for client in clients]
        ):
            yield from response.payloads

    def statistics_form(
        self, phase: Boundary, state: Tree, client: Client, ctx: Context
    ) -> Payload:
        """Return the shape of a statistics upload, computed from one image of weight 0."""
        return self.runtime.statistics_form(self._statistics_request(phase, state, ctx), client)

    def upload_form(self, request: ClientRequest) -> Payload | None:
        """Return names, shapes and types of a valid upload, if the server cannot trust clients.

        None: the form of the majority of uploads is valid.
        """
        return None

    def end_task_client(self, clients: Sequence[Client], ctx: Context) -> list[Payload]:
        """Return the uploads of clients that update their memory at the end of a task.

        An upload is empty if a client sends nothing. Its ``num_samples`` counts the images of the
        task and the exemplars.
        """
        payloads = []
        for response in self._responses(
            self._statistics_request("after_rounds", ctx.shared, ctx), [[c] for c in clients]
        ):
            self.client_state.update(response.client_state)
            payloads += response.payloads
        return payloads

    def exemplars(self, client: Client) -> Tensor:
        """Return positions of a client's exemplars of finished tasks."""
        return self.trainer.exemplars(self.memories.get(client.number, {}))

    def with_exemplars(self, client: Client) -> Client:
        """Return the client with its images of the task and its exemplars, each once."""
        return self.trainer.with_exemplars(client, self.memories.get(client.number, {}))

    def _groups(self, clients: Sequence[Client], ctx: Context) -> list[list[int]]:
        """Return groups of clients that share a forward, as positions in ``clients``.

        Clients of a group have similar numbers of images; the largest clients come first.
        """
        trainer = self.trainer

        def images(place: int) -> int:
            client = clients[place]
            return len(trainer.training_indices(client, self.memories.get(client.number, {}), ctx))

        by_length = sorted(range(len(clients)), key=images, reverse=True)
        together = 1 if isinstance(self.method, HasClientMemory) else self.plan.together
        return [by_length[start : start + together] for start in range(0, len(by_length), together)]

    def _responses(
        self, request: ClientRequest, groups: Sequence[Sequence[Client]]
    ) -> Iterator[ClientResponse]:
        """Yield the responses of groups of clients in order.

        Groups are disjoint; each is computed when its response is needed.
        """
        runtime = self.runtime
        for clients in groups:
            yield runtime.answer(request, clients, self._client_state_of(request, clients))

    def _client_state_of(self, request: ClientRequest, clients: Sequence[Client]) -> ClientState:
        """Return the state of clients that an exchange needs; statistics need none."""
        participants = clients if request.boundary in (None, "after_rounds") else ()
        return self.client_state.select(client.number for client in participants)

    def _statistics_request(self, boundary: Boundary, state: Tree, ctx: Context) -> ClientRequest:
        return ClientRequest(boundary, state, {}, ctx)
