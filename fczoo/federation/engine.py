"""All clients of a run: their groups in training, and their state between exchanges."""

import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.files import home, naming
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
from fczoo.federation.local_trainer import MakeOptimizers, make_optimizers
from fczoo.federation.uplink import Uplink

ALIGNMENT = 64  # bytes, as torch aligns what it allocates: sums can depend on it in their last bit


def on_disk(payload: Payload) -> Payload:
    """Move the tensors of an upload to a private file, which is removed together with them.

    Raises OSError, e.g. on a full disk.
    """
    folder = home() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        starts = {name: _append(file, value) for name, value in payload.items()}
        file.flush()
        if not file.tell():
            return payload
        memory = mmap.mmap(file.fileno(), 0)  # as long as a tensor needs it
    tensors: Tree = {name: _view(memory, start, payload[name]) for name, start in starts.items()}
    return payload.holding(tensors)


def _append(file: IO[bytes], value: Tensor) -> int:
    """Write a tensor at the end of a file and return its offset."""
    start = math.ceil(file.tell() / ALIGNMENT) * ALIGNMENT
    file.write(bytes(start - file.tell()))
    file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return start


def _view(mapped: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)


Tick = Callable[[int, float, Tensor], None]
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
    taught: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # see ClientState
    controls: ControlVariates = field(
        default_factory=ControlVariates
    )  # of the rule of local training, if any
    residuals: dict[int, Tree] = field(default_factory=dict)  # see ClientState
    make_optimizers: MakeOptimizers = make_optimizers
    uplink: Uplink | None = None  # see ClientRuntime

    @property
    def side(self) -> ClientRuntime:
        """Return the runtime of the clients."""
        parts = self.method, self.backbone, self.store, self.plan
        return ClientRuntime(*parts, self.controls.rule, self.make_optimizers, self.uplink)

    @property
    def client_state(self) -> ClientState:
        """Return the state of all clients, for reading and writing."""
        return ClientState(self.memories, self.taught, self.controls.clients, self.residuals)

    def train(
        self, state: Tree, clients: Sequence[Client], ctx: Context, tick: Tick = lambda *_: None
    ) -> list[Payload]:
        """Train ``clients`` and return their uploads in the same order.

        The payload of a client is empty if its loss or weights become infinite or NaN.
        """
        groups = self._groups(clients, ctx)
        request = ClientRequest(None, state, self.controls.shared, ctx)
        payloads: dict[int, Payload] = {}
        answers = self._answers(request, [[clients[i] for i in group] for group in groups])
        for group, answer in zip(groups, answers, strict=True):
            self.client_state.take(answer.kept)
            for client, (mean, steps) in answer.losses.items():
                tick(client, mean, steps)
            uploads = answer.payloads
            if self.plan.waiting == "disk":
                uploads = [on_disk(p) for p in uploads]
            elif self.plan.waiting == "host":
                uploads = [p.holding({k: v.cpu() for k, v in p.items()}) for p in uploads]
            payloads |= zip(group, uploads, strict=True)
        return [payloads[i] for i in range(len(clients))]

    def collect(
        self, phase: Boundary, state: Tree, clients: Sequence[Client], ctx: Context
    ) -> Iterator[Payload]:
        """Yield the statistics of each client from one pass over its data, on demand."""
        for answer in self._answers(
            self._surveying(phase, state, ctx), [[client] for client in clients]
        ):
            yield from answer.payloads

    def survey_form(self, phase: Boundary, state: Tree, client: Client, ctx: Context) -> Payload:
        """Return the shape of a statistics upload, computed from one image of weight 0."""
        return self.side.survey_form(self._surveying(phase, state, ctx), client)

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
        for answer in self._answers(
            self._surveying("after_rounds", ctx.shared, ctx), [[c] for c in clients]
        ):
            self.client_state.take(answer.kept)
            payloads += answer.payloads
        return payloads

    def exemplars(self, client: Client) -> Tensor:
        """Return positions of a client's exemplars of finished tasks."""
        return self.side.exemplars(self.memories.get(client.number, {}))

    def with_exemplars(self, client: Client) -> Client:
        """Return the client with its images of the task and its exemplars, each once."""
        return self.side.with_exemplars(client, self.memories.get(client.number, {}))

    def _groups(self, clients: Sequence[Client], ctx: Context) -> list[list[int]]:
        """Return groups of clients that share a forward, as positions in ``clients``.

        Clients of a group have similar numbers of images; the largest clients come first.
        """
        side = self.side

        def images(place: int) -> int:
            client = clients[place]
            return len(side.training_indices(client, self.memories.get(client.number, {}), ctx))

        by_length = sorted(range(len(clients)), key=images, reverse=True)
        together = 1 if isinstance(self.method, HasClientMemory) else self.plan.together
        return [by_length[start : start + together] for start in range(0, len(by_length), together)]

    def _answers(
        self, request: ClientRequest, groups: Sequence[Sequence[Client]]
    ) -> Iterator[ClientResponse]:
        """Yield the responses of groups of clients in order.

        Groups are disjoint; each is computed when its response is needed.
        """
        side = self.side
        for clients in groups:
            yield side.answer(request, clients, self._kept_by(request, clients))

    def _kept_by(self, request: ClientRequest, clients: Sequence[Client]) -> ClientState:
        """Return the state of clients that an exchange needs; statistics need none."""
        participants = clients if request.boundary in (None, "after_rounds") else ()
        return self.client_state.of(client.number for client in participants)

    def _surveying(self, boundary: Boundary, state: Tree, ctx: Context) -> ClientRequest:
        return ClientRequest(boundary, state, {}, ctx)
