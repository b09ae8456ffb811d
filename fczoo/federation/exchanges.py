"""One run's state, and what passes between its server and its clients."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fczoo.core.method import Concludes, Method, Surveys
from fczoo.core.payload import Payload
from fczoo.core.registry import make_aggregator
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree, nbytes
from fczoo.core.types import Boundary, Context, Exchange, Moment, ServerContext, Task
from fczoo.federation.batches import Client
from fczoo.federation.carried import memory_bytes
from fczoo.federation.checkpoint import Checkpoint, settled
from fczoo.federation.code import code_of, digest
from fczoo.federation.controls import Controls
from fczoo.federation.diagnostics import Probe
from fczoo.federation.downlink import Ledger, broadcast
from fczoo.federation.engine import Engine
from fczoo.federation.environment import versions
from fczoo.federation.observer import Observer
from fczoo.federation.plan import Plan
from fczoo.federation.result import Result
from fczoo.federation.sound import check_stateless, sound
from fczoo.federation.spread import Elsewhere, Spread
from fczoo.federation.sums import gathered
from fczoo.federation.uplink import Arrival
from fczoo.federation.world import World
from fczoo.security.guard import Stopped
from fczoo.security.privacy import Draw


class Exchanges:
    """The state of one run on its server, and every way in which it meets its clients but training."""

    def __init__(
        self,
        world: World,
        method: Method,
        seed: int,
        observer: Observer,
        checkpoint: Checkpoint | None,
        probe: Probe | None,
        elsewhere: Elsewhere | None = None,
    ):
        world.check_labels(method)
        self.world, self.method, self.seed = world, method, seed
        self.observer, self.checkpoint, self.probe = observer, checkpoint, probe
        self.elsewhere = elsewhere  # where clients act; None: here
        self.settings, self.stream, self.backbone = world.settings, world.stream, world.backbone
        self.training = method.training()
        averaging = self.settings.aggregator or self.training.averaging
        check_stateless(averaging)
        self.average = sound(make_aggregator(averaging))
        self.uplink = world.uplink(method, seed)
        self.uplink.check()
        self.controls = Controls(self.uplink.rule)
        self.average_controls = sound(make_aggregator(self.settings.aggregator or "uniform"))
        self.train = self.uplink.attackers.store(world.stream, world.partition, world.train)
        self.rounds = [
            self.settings.rounds if self.training.active_optims(t, 0) else 0 for t in self.stream.tasks
        ]
        self.balanced = [bool(self.training.balanced and t.index) for t in self.stream.tasks]
        self.state: Tree = {}
        self.ledger = Ledger()
        self.memories: dict[int, Tree] = {}  # client -> what it keeps from round to round
        self.taught: dict[int, dict[int, Tensor]] = {}  # what the task's teacher said of the images, see Kept
        self.result = Result(
            method.name,
            asdict(method),
            self.settings.portable(),
            seed,
            {**asdict(self.backbone.config), "sha256": self.backbone.sha256},
            {"spec": world.partition.spec, "seed": world.partition.seed, "sha256": world.partition.sha256},
            list(self.stream.class_order),
            [t.size for t in self.stream.tasks],
            [len(self.stream.positions(self.stream.test, t)) for t in self.stream.tasks],
            remark="; ".join(filter(None, [method.remark(), self.uplink.rule.remark(self.training)])),
            versions={**versions(), "code": digest(code_of(self.settings, method))},
        )
        self.result.privacy = self.uplink.privacy.promise(self._draws() if self.settings.dp_noise else [])

    def _engine(self, plan: Plan) -> Engine:
        """The clients of a task."""
        given = self.method, self.backbone, self.train, plan, self.memories, self.taught, self.controls
        return Spread(*given, elsewhere=self.elsewhere) if self.elsewhere else Engine(*given)

    def _candidates(self, joined: list[Client]) -> list[Client]:
        """The clients among which a round's participants are drawn, of all that have joined."""
        return joined if self.settings.draw_among == "joined" else [c for c in joined if len(c.index)]

    def _draws(self) -> list[Draw]:
        """How participants of the whole run are drawn; of rounds on exemplars alone everybody takes part."""
        draws = []
        for task, rounds, balanced in zip(self.stream.tasks, self.rounds, self.balanced, strict=True):
            clients = len(self._candidates(self.world.clients(task, self.training.scope, idle=True)))
            once = self.settings.client_draw == "task"
            times, uploads = (1, rounds) if once else (rounds, 1)
            draws.append(Draw(clients, self.settings.drawn(clients), uploads, times))
            draws.append(Draw(clients, clients, 1, int(balanced)))
        return draws

    def _survey(
        self,
        moment: Moment,
        engine: Engine,
        clients: list[Client],
        task: Task,
        among: Callable[[Task], Collection[int]] | None = None,
    ) -> None:
        """Ask clients with data for sums; those of all, added up, are those of the data in one place.

        ``among`` says which clients are asked in a task, where not all are.
        """
        if not isinstance(self.method, Surveys) or moment not in self.method.surveys():
            return
        if among:
            numbers = among(task)
            clients = [client for client in clients if client.number in numbers]
        clients = self.world.unsurveyed(clients, task, self.training.scope, among)
        if not clients:
            return
        shared, _ = self._send(clients)
        asked, exchange = Context(task, 0, self.rounds[task.index], {}), Exchange(task, survey=moment)
        folded: Tree = {}
        with self.result.phase("surveys"):
            sent = engine.survey(moment, shared, clients, asked)
            if self.uplink.folds:
                form = engine.survey_form(moment, shared, clients[0], asked)
                arrival, folded = self.uplink.collect(sent, clients, shared, exchange, form)
            else:
                arrival = self.uplink.arrive(list(sent), clients, shared, exchange)
        self._note_storage(shared, clients)
        sums, ctx = self._sums(arrival, task, moment)
        sums |= folded
        self.state = self._place(self.method.absorb(moment, self.state, sums, ctx))

    def _conclude(self, engine: Engine, clients: list[Client], task: Task) -> list[Client]:
        """Every client settles what it keeps of a task.

        Returns those that have images of the task or exemplars, with both, each image once.
        """
        if not isinstance(self.method, Concludes):
            return [c for c in clients if len(c.index)]
        clients = [c for c in clients if len(c.index) + len(engine.exemplars(c))]
        shared, _ = self._send(clients)
        rounds = self.rounds[task.index]
        with self.result.phase("surveys"):
            sent = engine.conclude(clients, Context(task, rounds, rounds, shared))
        self._note_storage(shared, clients)
        holding = [engine.with_exemplars(c) for c in clients]
        uploads = [(p, c) for p, c in zip(sent, holding, strict=True) if p]
        if uploads:
            payloads, senders = map(list, zip(*uploads, strict=True))
            arrival = self.uplink.arrive(payloads, senders, shared, Exchange(task, survey="conclude"))
            sums, ctx = self._sums(arrival, task, "conclude")
            self.state = self._place(self.method.concluded(self.state, sums, ctx))
        return holding

    def _sums(self, arrival: Arrival, task: Task, boundary: Boundary) -> tuple[Tree, ServerContext]:
        """What arrived at a boundary of a task, added up, and what the server knows besides."""
        payloads, _, _ = self._receive(arrival)
        sums = gathered(payloads, self.training.separate)
        number = 0 if boundary == "begin" else self.rounds[task.index]
        return sums, self._server_context(f"absorb {boundary}", task, number, payloads)

    def _server_context(
        self, purpose: str, task: Task, number: int, payloads: Sequence[Payload]
    ) -> ServerContext:
        return ServerContext(
            task,
            number,
            self.rounds[task.index],
            self.world.partition.clients,
            len(payloads),
            sum(p.num_samples for p in payloads),
            self.backbone,
            self._rng(purpose, task, None, number),
        )

    def _control(self, payloads: Sequence[Payload]) -> None:
        """Fold what clients have uploaded of their control variates into the server's."""
        before = self.controls.broadcast
        self.controls.absorb(payloads, self.world.partition.clients, self.average_controls)
        self.ledger.update(before, self.controls.broadcast)

    def _send(self, clients: Sequence[Client]) -> tuple[Tree, int]:
        """The broadcast, and the bytes of what the clients do not have yet of it."""
        shared = broadcast(self.method, self.state)
        total = self.ledger.send({**shared, **self.controls.broadcast}, [c.number for c in clients])
        self.result.bytes_down += total
        return shared, total

    def _note_storage(self, shared: Tree, clients: Sequence[Client]) -> None:
        """Note the bytes that one of the clients asked holds: the broadcast, its memory, and the pixels of
        images in it.
        """
        image, kept = self.world.train.pixels[0].numel(), self.training.exemplars
        own = [
            memory_bytes(self.memories.get(c.number, {}), kept, image)
            + nbytes(self.controls.clients.get(c.number, {}))
            for c in clients
        ]
        held = nbytes(shared) + nbytes(self.controls.server) + max(own, default=0)
        self.result.client_storage = max(self.result.client_storage or 0, held)

    def _receive(self, arrival: Arrival) -> tuple[list[Payload], list[dict[str, Any]], int]:
        """Note what arrived; returns the sound uploads, the rejections and the bytes of all of them."""
        total = sum(arrival.bytes.values())
        self.result.bytes_up += total
        self.result.uploaded = dict(Counter(self.result.uploaded) + Counter(arrival.bytes))
        self.result.client_rounds += arrival.uploads
        self.result.rejected += arrival.rejected
        self.result.far = dict(Counter(self.result.far) + Counter(map(str, arrival.far)))
        return arrival.payloads, arrival.rejected, total

    def _place(self, new: Tree) -> Tree:
        """State on the device, in at least float32; the ledger notes which tensors have changed.

        Sums in float64 stay in float64. Raises Stopped where a value is not finite.
        """
        least, placed = torch.promote_types(self.backbone.dtype, torch.float32), {}
        for name, value in new.items():
            dtype = torch.promote_types(value.dtype, least) if value.is_floating_point() else value.dtype
            placed[name] = value = settled(value.detach().to(self.backbone.device, dtype))
            if not value.isfinite().all():
                raise Stopped(
                    f"{self.method.name} diverged: {name} is not finite on the server; "
                    f"lower its learning rates with --set"
                )
        self.ledger.update(self.state, placed)
        self.result.server_storage = max(self.result.server_storage or 0, nbytes(placed))
        return placed

    def _rng(self, purpose: str, task: Task, device: str | None, number: int = 0) -> torch.Generator:
        return torch_stream(purpose, self.seed, task.index, number, device=device or self.backbone.device)
