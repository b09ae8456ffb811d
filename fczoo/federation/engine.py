"""All clients of a run: who trains beside whom, and what each keeps from one exchange to the next."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method, Remembers
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Boundary, Context, Moment
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.carried import Kept
from fczoo.federation.client_side import Answer, Asked, ClientSide
from fczoo.federation.controls import Controls
from fczoo.federation.learning import MakeSteps
from fczoo.federation.optimizers import Optimizers
from fczoo.federation.plan import Plan
from fczoo.federation.waiting import on_disk

Tick = Callable[[int, float, Tensor], None]
"""Is told a client's number, its mean loss and those of its steps [n] when its training ends."""


@dataclass(frozen=True)
class Engine:
    """Has clients act, during one task, and keeps for them what they keep."""

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    memories: dict[int, Tree] = field(default_factory=dict)  # client -> what it keeps from round to round
    taught: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # see Kept
    controls: Controls = field(default_factory=Controls)  # of the rule of local training, if any
    make_steps: MakeSteps = Optimizers

    @property
    def side(self) -> ClientSide:
        """What clients do."""
        return ClientSide(
            self.method, self.backbone, self.store, self.plan, self.controls.rule, self.make_steps
        )

    @property
    def kept(self) -> Kept:
        """What all clients keep, to be read and to be written."""
        return Kept(self.memories, self.taught, self.controls.clients)

    def train(
        self, state: Tree, clients: Sequence[Client], ctx: Context, tick: Tick = lambda *_: None
    ) -> list[Payload]:
        """Payloads of ``clients``, in their order.

        A client whose loss or weights are not finite any more sends nothing: its payload is empty.
        """
        groups = self._groups(clients, ctx)
        asked = Asked(None, state, self.controls.server, ctx)
        payloads: dict[int, Payload] = {}
        answers = self._answers(asked, [[clients[i] for i in group] for group in groups])
        for group, answer in zip(groups, answers, strict=True):
            self.kept.take(answer.kept)
            for client, (mean, steps) in answer.losses.items():
                tick(client, mean, steps)
            sent = answer.payloads
            if self.plan.waiting == "disk":
                sent = [on_disk(p) for p in sent]
            elif self.plan.waiting == "host":
                sent = [p.holding({k: v.cpu() for k, v in p.items()}) for p in sent]
            payloads |= zip(group, sent, strict=True)
        return [payloads[i] for i in range(len(clients))]

    def survey(
        self, moment: Moment, state: Tree, clients: Sequence[Client], ctx: Context
    ) -> Iterator[Payload]:
        """Sums of the method's survey over one pass of each client's data, made when they are asked for."""
        for answer in self._answers(self._surveying(moment, state, ctx), [[client] for client in clients]):
            yield from answer.payloads

    def survey_form(self, moment: Moment, state: Tree, client: Client, ctx: Context) -> Payload:
        """What uploads of a survey look like, from one image that counts for nothing."""
        return self.side.survey_form(self._surveying(moment, state, ctx), client)

    def conclude(self, clients: Sequence[Client], ctx: Context) -> list[Payload]:
        """Uploads of clients that settle what they keep of a task, empty where one sends nothing.

        Behind an upload are the images of the task and the exemplars.
        """
        payloads = []
        for answer in self._answers(self._surveying("conclude", ctx.shared, ctx), [[c] for c in clients]):
            self.kept.take(answer.kept)
            payloads += answer.payloads
        return payloads

    def exemplars(self, client: Client) -> Tensor:
        """Positions of the images that a client keeps of finished tasks."""
        return self.side.exemplars(self.memories.get(client.number, {}))

    def with_exemplars(self, client: Client) -> Client:
        """The client with its images of the task and its exemplars, each once."""
        return self.side.with_exemplars(client, self.memories.get(client.number, {}))

    def _groups(self, clients: Sequence[Client], ctx: Context) -> list[list[int]]:
        """Places among ``clients`` of those that share a forward: similar lengths, the longest first."""
        side = self.side

        def images(place: int) -> int:
            client = clients[place]
            return len(side.learned(client, self.memories.get(client.number, {}), ctx))

        by_length = sorted(range(len(clients)), key=images, reverse=True)
        together = 1 if isinstance(self.method, Remembers) else self.plan.together
        return [by_length[start : start + together] for start in range(0, len(by_length), together)]

    def _answers(self, asked: Asked, groups: Sequence[Sequence[Client]]) -> Iterator[Answer]:
        """What groups of clients answer, in their order, as each is asked for; nobody is in two groups."""
        side = self.side
        for clients in groups:
            yield side.answer(asked, clients, self._kept_by(asked, clients))

    def _kept_by(self, asked: Asked, clients: Sequence[Client]) -> Kept:
        """What some clients keep that an exchange is about; a survey's sums are of images alone."""
        concerned = clients if asked.boundary in (None, "conclude") else ()
        return self.kept.of(client.number for client in concerned)

    def _surveying(self, boundary: Boundary, state: Tree, ctx: Context) -> Asked:
        return Asked(boundary, state, {}, ctx)
