"""The rounds of one run: clients train, the server merges, every task ends in an evaluation."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.core.method import Method, Surveys
from fczoo.core.metrics import all_metrics
from fczoo.core.payload import Payload
from fczoo.core.registry import make_aggregator
from fczoo.core.seeds import numpy_stream, torch_stream
from fczoo.core.tree import Tree, nbytes, select
from fczoo.core.types import Context, Exchange, Moment, ServerContext, Task
from fczoo.data.views import get_augment
from fczoo.federation.batches import Client
from fczoo.federation.carried import Carried, from_trees, memory_bytes, to_trees
from fczoo.federation.checkpoint import Checkpoint, Snapshot, settled
from fczoo.federation.diagnostics import Probe
from fczoo.federation.downlink import Ledger, broadcast
from fczoo.federation.engine import Engine, Plan
from fczoo.federation.environment import peak_memory, reset_peak_memory, versions
from fczoo.federation.evaluate import accuracy_row
from fczoo.federation.observer import Observer
from fczoo.federation.result import PROGRESS, Result
from fczoo.federation.settings import Settings
from fczoo.federation.sums import gathered
from fczoo.federation.uplink import Arrival
from fczoo.federation.world import World
from fczoo.security.guard import Stopped

TOGETHER_LIMIT = 4_000_000
"""Trained scalars a client, above which clients train one at a time unless told otherwise."""


def group_size(settings: Settings, device: torch.device, clients: int, trained_scalars: int) -> int:
    """Clients that share a forward."""
    if settings.together == "auto":
        return clients if device.type == "cuda" and trained_scalars <= TOGETHER_LIMIT else 1
    return settings.together


class Run:
    """The rounds of one run."""

    def __init__(
        self,
        world: World,
        method: Method,
        seed: int,
        observer: Observer,
        checkpoint: Checkpoint | None,
        probe: Probe | None,
    ):
        self.world, self.method, self.seed = world, method, seed
        self.observer, self.checkpoint, self.probe = observer, checkpoint, probe
        self.settings, self.stream, self.backbone = world.settings, world.stream, world.backbone
        self.training = method.training()
        self.average = make_aggregator(self.settings.aggregator or self.training.averaging)
        self.uplink = world.uplink(method, seed)
        self.train = self.uplink.attackers.store(world.stream, world.partition, world.train)
        self.rounds = [
            self.settings.rounds if self.training.active_optims(t, 0) else 0 for t in self.stream.tasks
        ]
        self.state: Tree = {}
        self.ledger = Ledger()
        self.memories: dict[int, Tree] = {}  # client -> what it keeps from round to round
        self.taught: dict[int, Tensor] = {}  # what the task's teacher said of the images, see Engine
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
            remark=method.remark(),
            versions=versions(),
        )
        self.result.privacy = self.uplink.privacy.promise(sum(self.rounds))

    def run(self) -> Result:
        tasks_done, rounds_done = self._restore()
        self.begin = time.perf_counter() - self.result.seconds
        reset_peak_memory(self.backbone.device)
        done = sum(self.rounds[:tasks_done]) + rounds_done
        self.observer.start(self.method, self.seed, self.world.partition.clients, sum(self.rounds), done)
        for task in self.stream.tasks[tasks_done:]:
            self._learn(task, rounds_done)
            rounds_done = 0
            with self.result.phase("evaluation"):
                batch = self._plan().pass_size
                row = accuracy_row(self.method, self.world, self.state, task, batch)
                self.result.accuracy.append(row)
            self.result.metrics = all_metrics(self.result.accuracy, self.result.test_counts)
            self.result.seconds = time.perf_counter() - self.begin
            self.result.peak_memory = peak_memory(self.backbone.device)
            self.observer.task(self.result)
            if task.index + 1 < len(self.stream.tasks):
                self._save(task.index + 1, 0)
        return self.result

    def _learn(self, task: Task, done: int) -> None:
        """One task, of which ``done`` rounds were done before."""
        scope = self.training.scope
        clients = self.world.clients(task, scope)
        candidates = clients
        if self.settings.draw_among == "joined":
            candidates = self.world.clients(task, scope, idle=True)
        if not done:
            self.taught.clear()
            rng = self._rng("begin", task, "cpu")
            self.state = self._place(self.method.begin_task(self.state, task, self.backbone, rng))
        trained = select(self.state, *self.training.optims)
        self.result.trained_scalars = sum(v.numel() for v in trained.values())
        engine = Engine(self.method, self.backbone, self.train, self._plan(), self.memories, self.taught)
        if not done:
            self._survey("begin", engine, clients, task)
            if self.probe:
                self.probe.begun(self.method, self.state)
        for number in range(done, self.rounds[task.index]):
            self._round(engine, candidates, task, number)
            self._save(task.index, number + 1)
        self._survey("end", engine, clients, task)
        if self.probe:
            self.probe.learned(self.world, self.method, self.state, task)

    def _round(self, engine: Engine, candidates: list[Client], task: Task, number: int) -> None:
        """One round: clients are drawn and train, the server merges what arrives."""
        started = time.perf_counter()
        rounds = self.rounds[task.index]
        exchange = Exchange(task, number)
        drawn = self._participants(candidates, task, number)
        present = [c for c in drawn if len(c.index)]
        shared, down = self._send(drawn)
        losses: dict[int, float] = {}

        def tick(client: int, loss: float) -> None:
            losses[client] = loss
            self.observer.client(task.index, number, loss)

        heard = self.uplink.heard(present, exchange)
        with self.result.phase("training"):
            sent = engine.train(self.state, heard, Context(task, number, rounds, shared), tick)
        payloads, rejected, up = self._receive(self.uplink.arrive(sent, present, shared, exchange, losses))
        self._note_storage(shared)
        if self.probe and payloads and number == rounds - 1:
            self.probe.trained(self.world, self.method, self.state, payloads, task)
        if payloads:  # else nobody drawn has data, and the state stays
            with self.result.phase("server"):
                merged = self.method.aggregate(payloads, self.average)
                merged = {k: v.to(self.backbone.device) for k, v in merged.items()}
                ctx = self._server_context("server", task, number, payloads)
                self.state = self._place(self.method.server_update(self.state, merged, ctx))
        mean_loss = statistics.fmean(losses[p.client] for p in payloads) if payloads else None
        self.observer.round(
            {
                "task": task.index,
                "round": number,
                "clients": [c.number for c in present],
                "rejected": rejected,
                "loss": mean_loss,
                "bytes_up": up,
                "bytes_down": down,
                "seconds": time.perf_counter() - started,
            }
        )

    def _save(self, tasks: int, rounds: int) -> None:
        """Keep the run as it is after ``tasks`` tasks and ``rounds`` rounds of the next one."""
        if self.checkpoint:
            self.result.seconds = time.perf_counter() - self.begin
            notes: dict[str, Any] = {
                "ledger": self.ledger.notes(),
                "result": {k: getattr(self.result, k) for k in PROGRESS},
            }
            begin: Tree = {}
            if self.probe:
                notes["diagnostics"], begin = self.probe.size(), self.probe.begin
            trees = to_trees(Carried(self.state, self.memories, self.taught, begin))
            self.checkpoint.save(Snapshot(tasks, rounds, trees, notes))

    def _restore(self) -> tuple[int, int]:
        """Take up the run where it was saved; returns how many tasks and rounds of the next one are done."""
        snapshot = self.checkpoint.load(self.backbone.device) if self.checkpoint else None
        if snapshot is None:
            if self.probe:
                self.probe.resume(0, {})
            return 0, 0
        notes = snapshot.notes
        self.state, self.memories, self.taught, begin = from_trees(snapshot.trees)
        if self.probe:
            self.probe.resume(notes.get("diagnostics", 0), begin)
        self.ledger.restore(notes["ledger"])
        self.result = replace(self.result, **notes["result"])
        return snapshot.task, snapshot.round

    def _survey(self, moment: Moment, engine: Engine, clients: list[Client], task: Task) -> None:
        """Ask every client with data for sums; added up, they are those of the data in one place."""
        if not isinstance(self.method, Surveys) or moment not in self.method.surveys():
            return
        rounds = self.rounds[task.index]
        shared, _ = self._send(clients)
        with self.result.phase("surveys"):
            sent = engine.survey(moment, shared, clients, Context(task, 0, rounds, {}))
        self._note_storage(shared)
        arrival = self.uplink.arrive(sent, clients, shared, Exchange(task, survey=moment))
        payloads, _, _ = self._receive(arrival)
        sums = gathered(payloads, self.training.separate)
        ctx = self._server_context(f"absorb {moment}", task, 0 if moment == "begin" else rounds, payloads)
        self.state = self._place(self.method.absorb(moment, self.state, sums, ctx))

    def _server_context(
        self, purpose: str, task: Task, number: int, payloads: Sequence[Payload]
    ) -> ServerContext:
        return ServerContext(
            task,
            number,
            self.rounds[task.index],
            self.world.partition.clients,
            sum(p.num_samples for p in payloads),
            self.backbone,
            self._rng(purpose, task, None, number),
        )

    def _plan(self) -> Plan:
        s, scalars = self.settings, self.result.trained_scalars
        accelerated = self.backbone.device.type == "cuda"
        together = group_size(s, self.backbone.device, self.world.partition.clients, scalars)
        offload = accelerated and scalars > TOGETHER_LIMIT
        return Plan(
            s.epochs,
            s.batch_size,
            get_augment(s.augment),
            self.seed,
            together,
            s.cache_queries,
            256 if accelerated else 64,
            offload,
        )

    def _participants(self, clients: list[Client], task: Task, number: int) -> list[Client]:
        """The clients drawn for a round, at least one."""
        drawing = number if self.settings.client_draw == "round" else 0
        rng = numpy_stream("participation", self.seed, task.index, drawing)
        chosen = rng.choice(len(clients), self.settings.drawn(len(clients)), replace=False)
        return [clients[i] for i in sorted(chosen)]

    def _send(self, clients: Sequence[Client]) -> tuple[Tree, int]:
        """The broadcast, and the bytes of what the clients do not have yet of it."""
        shared = broadcast(self.method, self.state)
        total = self.ledger.send(shared, [c.number for c in clients])
        self.result.bytes_down += total
        return shared, total

    def _note_storage(self, shared: Tree) -> None:
        """Note the bytes that a client holds: the broadcast, its memory, and the pixels of images in it."""
        image = self.world.train.pixels[0].numel()
        memories = [memory_bytes(m, self.training.exemplars, image) for m in self.memories.values()]
        held = nbytes(shared) + max(memories, default=0)
        self.result.client_storage = max(self.result.client_storage or 0, held)

    def _receive(self, arrival: Arrival) -> tuple[list[Payload], list[dict[str, Any]], int]:
        """Note what arrived; returns the sound uploads, the rejections and the bytes of all of them."""
        total = sum(arrival.bytes.values())
        self.result.bytes_up += total
        self.result.uploaded = dict(Counter(self.result.uploaded) + Counter(arrival.bytes))
        self.result.client_rounds += arrival.uploads
        self.result.rejected += arrival.rejected
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
