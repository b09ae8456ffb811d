"""One run: a method learns the tasks of a stream over simulated clients and is evaluated after each."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from .backbone import Backbone
from .check import need_data
from .core import Context, Method, Scope, Task, Tree, drop, nbytes, select
from .data import Stream, make_stream
from .diagnostics import Probe
from .engine import Client, Divergence, Engine, Plan, broadcast
from .errors import FczooError
from .evaluate import accuracy_row
from .images import ImageStore, get_augment
from .metrics import all_metrics
from .options import build
from .partition import Partition, make_partition
from .record import Observer, Result, Silent, peak_memory, versions
from .registry import AGGREGATORS, METHODS
from .seeds import numpy_stream, torch_stream
from .settings import DTYPES, Settings, pick_device
from .weights import load_backbone

TOGETHER_LIMIT = 4_000_000  # trained scalars a client, above which clients train one at a time unless told otherwise


@dataclass(frozen=True)
class Bench:
    """What the runs of one benchmark share: loaded once, the same for every method and seed."""

    settings: Settings
    stream: Stream
    partition: Partition
    backbone: Backbone
    train: ImageStore
    test: ImageStore

    @staticmethod
    def open(settings: Settings) -> "Bench":
        """Load data, partition and backbone. Raises FczooError for whatever is missing or does not fit."""
        device, dtype = pick_device(settings.device), DTYPES[settings.precision]
        get_augment(settings.augment)
        s = settings
        need_data(s.dataset, s.root, s.backbone)
        backbone = load_backbone(s.backbone, image_size=s.image_size, mean=s.mean, std=s.std).to(device, dtype)  # decoding takes longer
        stream, partition = open_stream(s)
        train, test = (ImageStore(part, backbone, s.test_crop) for part in (stream.train, stream.test))
        return Bench(settings, stream, partition, backbone, train, test)

    def clients(self, task: Task, scope: Scope = "task", idle: bool = False) -> list[Client]:
        """The clients that hold data of a task, or of the tasks so far; with ``idle``, all that have joined by then."""
        tasks = self.partition.tasks[: task.index + 1] if scope != "task" else self.partition.tasks[task.index : task.index + 1]
        owned = [np.concatenate(parts) for parts in zip(*tasks, strict=True)][: self.partition.present(task.index)]
        if scope == "pooled":
            owned = [np.unique(np.concatenate(owned))]
        places = [torch.from_numpy(np.searchsorted(self.stream.train_index, index)) for index in owned]
        return [Client(k, place) for k, place in enumerate(places) if idle or len(place)]

    def check(self, method: Method) -> None:
        """Raise FczooError where ``method`` cannot start on this backbone, before anything is run or written."""
        AGGREGATORS.get(self.settings.aggregator or method.averaging)
        method.begin_task({}, self.stream.tasks[0], self.backbone, torch.Generator())

    def run(self, method: Method, seed: int = 0, observer: Observer | None = None, probe: Probe | None = None) -> Result:
        """Train ``method`` over all tasks. The same settings and seed give the same result on the same device, with or without a probe."""
        return _Run(self, method, seed, observer or Silent(), probe).run()


def open_stream(s: Settings, pixels: bool = True) -> tuple[Stream, Partition]:
    """Load the images, or only their labels, and split them. Raises FczooError for whatever is missing or impossible."""
    kept = s.train_per_class, s.test_per_class, s.stored_size
    stream = make_stream(s.dataset, s.root, s.tasks, s.class_order_seed, *kept, s.class_order, pixels)
    return stream, make_partition(stream, s.partition, s.clients, s.partition_seed, s.joining, s.transition)


def run(method: Method, *, seed: int = 0, observer: Observer | None = None, dataset: str = "digits", **settings: Any) -> Result:
    """Run one method: ``fczoo.run(fczoo.create_method("pilora", rank=8), dataset="digits", rounds=2)``.

    ``settings`` are the fields of ``Settings``; those not given follow the data set's defaults.
    """
    return Bench.open(Settings.for_dataset(dataset, **settings)).run(method, seed, observer)


def create_method(name: str, dataset: str | None = None, **options: Any) -> Method:
    """Method by name; options beat the method's values for ``dataset``, which beat its defaults."""
    cls = METHODS.get(name)
    return build(cls, name, {**cls.tuned.get(dataset, {}), **options})


def group_size(settings: Settings, device: torch.device, clients: int, trained_scalars: int) -> int:
    """Clients that share a forward."""
    if settings.together == "auto":
        return clients if device.type == "cuda" and trained_scalars <= TOGETHER_LIMIT else 1
    return settings.together


class _Run:
    """The rounds of one run."""

    def __init__(self, bench: Bench, method: Method, seed: int, observer: Observer, probe: Probe | None):
        self.bench, self.method, self.seed, self.observer, self.probe = bench, method, seed, observer, probe
        self.settings, self.stream, self.backbone = bench.settings, bench.stream, bench.backbone
        self.average = AGGREGATORS.get(self.settings.aggregator or method.averaging)
        self.rounds = self.settings.rounds if method.optims() else 0
        self.state: Tree = {}
        self.version: dict[str, int] = {}  # state name -> how often it has changed
        self.memories: dict[int, Tree] = {}  # client -> what it keeps from round to round
        self.known: dict[int, dict[str, int]] = {}  # client -> the versions that it has
        self.result = Result(
            method.name,
            asdict(method),  # type: ignore[call-overload]
            self.settings.portable(),
            seed,
            {**asdict(self.backbone.config), "sha256": self.backbone.sha256},
            {"spec": bench.partition.spec, "seed": bench.partition.seed, "sha256": bench.partition.sha256},
            list(self.stream.class_order),
            [t.size for t in self.stream.tasks],
            [len(self.stream.positions(self.stream.test, t)) for t in self.stream.tasks],
            remark=method.remark(),
            versions=versions(),
        )

    def run(self) -> Result:
        begin = time.perf_counter()
        if self.backbone.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.observer.start(self.method, self.seed, self.bench.partition.clients, self.rounds * len(self.stream.tasks))
        for task in self.stream.tasks:
            self._learn(task)
            batch = 256 if self.backbone.device.type == "cuda" else 64
            with self.result.phase("evaluation"):
                self.result.accuracy.append(accuracy_row(self.method, self.bench.test, self.state, self.stream, task, batch))
            self.result.metrics = all_metrics(self.result.accuracy, self.result.test_counts)
            self.result.seconds = time.perf_counter() - begin
            self.result.peak_memory = peak_memory(self.backbone.device)
            self.observer.task(self.result)
        return self.result

    def _learn(self, task: Task) -> None:
        clients = self.bench.clients(task, self.method.scope())
        candidates = self.bench.clients(task, self.method.scope(), idle=self.settings.draw_among == "joined")
        self.state = self._place(self.method.begin_task(self.state, task, self.backbone, self._rng("begin", task, "cpu")))
        trained = tuple(self.method.optims())
        self.result.trained_scalars = sum(v.numel() for v in select(self.state, *trained).values()) if trained else 0
        engine = Engine(self.method, self.backbone, self.bench.train, self._plan(), self.memories)
        self._survey("begin", engine, clients, task)
        if self.probe:
            self.probe.begun(self.method, self.state)
        for number in range(self.rounds):
            started = time.perf_counter()
            drawn = self._participants(candidates, task, number)
            present = [c for c in drawn if len(c.index)]
            down = self._send(drawn)
            shared = broadcast(self.method, self.state)
            losses: list[float] = []

            def tick(loss: float, number: int = number, losses: list[float] = losses) -> None:
                losses.append(loss)
                self.observer.client(task.index, number, loss)

            with self.result.phase("training"):
                payloads = engine.train(self.state, present, Context(task, number, self.rounds, shared), tick)
            up = self._receive(payloads)
            self._note_storage(shared)
            if self.probe and payloads and number == self.rounds - 1:
                self.probe.trained(self.bench, self.method, self.state, payloads, task)
            if payloads:  # else nobody drawn has data, and the state stays
                with self.result.phase("server"):
                    merged = {k: v.to(self.backbone.device) for k, v in self._aggregate(payloads).items()}
                    rng = self._rng("server", task, None, number)
                    self.state = self._place(self.method.server_update(self.state, merged, task, self.backbone, rng))
            self.observer.round(
                {
                    "task": task.index,
                    "round": number,
                    "clients": [c.number for c in present],
                    "loss": sum(losses) / len(losses) if losses else None,
                    "bytes_up": up,
                    "bytes_down": down,
                    "seconds": time.perf_counter() - started,
                }
            )
        self._survey("end", engine, clients, task)
        if self.probe:
            self.probe.learned(self.bench, self.method, self.state, task)

    def _survey(self, moment: Literal["begin", "end"], engine: Engine, clients: list[Client], task: Task) -> None:
        """Ask every client with data for sums; they add up, so the server sees them as if the data were in one place."""
        if moment in self.method.surveys():
            self._send(clients)
            with self.result.phase("surveys"):
                payloads = engine.survey(moment, broadcast(self.method, self.state), clients, Context(task, 0, self.rounds, {}))
            self._note_storage(broadcast(self.method, self.state))
            self._receive(payloads)
            sums = {k: torch.stack([p[k] for p in payloads]).sum(0) for k in drop(payloads[0], "client")}
            self.state = self._place(self.method.absorb(moment, self.state, sums, task))

    def _plan(self) -> Plan:
        s, accelerated = self.settings, self.backbone.device.type == "cuda"
        together = group_size(s, self.backbone.device, self.bench.partition.clients, self.result.trained_scalars)
        offload = accelerated and self.result.trained_scalars > TOGETHER_LIMIT
        return Plan(s.epochs, s.batch_size, get_augment(s.augment), self.seed, together, s.cache_queries, 256 if accelerated else 64, offload)

    def _participants(self, clients: list[Client], task: Task, number: int) -> list[Client]:
        """The clients drawn for a round, at least one."""
        drawing = number if self.settings.client_draw == "round" else 0
        chosen = numpy_stream("participation", self.seed, task.index, drawing).choice(len(clients), self.settings.drawn(len(clients)), replace=False)
        return [clients[i] for i in sorted(chosen)]

    def _send(self, clients: Sequence[Client]) -> int:
        """Bytes down: what each client does not have yet of the current broadcast."""
        tree, total = broadcast(self.method, self.state), 0
        current = {name: self.version[name] for name in tree}
        for client in clients:
            known = self.known.get(client.number, {})
            total += nbytes({name: v for name, v in tree.items() if known.get(name) != current[name]})
            self.known[client.number] = current
        self.result.bytes_down += total
        return total

    def _note_storage(self, shared: Tree) -> None:
        """A client holds what the server broadcast and its memory; images that it remembers count with their pixels."""
        image = self.bench.train.pixels[0].numel()
        memories = (nbytes(drop(m, "exemplar.index")) + image * len(m.get("exemplar.index", ())) for m in self.memories.values())
        held = nbytes(shared) + max(memories, default=0)
        self.result.client_storage = max(self.result.client_storage or 0, held)

    def _aggregate(self, payloads: Sequence[Tree]) -> Tree:
        try:
            return self.method.aggregate(payloads, self.average)
        except KeyError as error:
            if self.settings.aggregator is None:
                raise
            name = self.settings.aggregator
            raise FczooError(f"aggregator {name} reads {error}, which {self.method.name} does not upload; take one such as uniform") from error

    def _receive(self, payloads: Sequence[Tree]) -> int:
        total = sum(map(nbytes, payloads))
        self.result.bytes_up += total
        self.result.client_rounds += len(payloads)
        return total

    def _place(self, new: Tree) -> Tree:
        """State on the device, in at least float32; notes which tensors have changed."""
        dtype, placed = torch.promote_types(self.backbone.dtype, torch.float32), {}
        for name, value in new.items():
            placed[name] = value = value.detach().to(self.backbone.device, dtype if value.is_floating_point() else value.dtype)
            if not value.isfinite().all():
                raise Divergence(f"{self.method.name} diverged: {name} is not finite on the server; lower its learning rates with --set")
            before = self.state.get(name)
            if before is None or before.shape != value.shape or not torch.equal(before, value):
                self.version[name] = self.version.get(name, 0) + 1
        self.result.server_storage = max(self.result.server_storage or 0, nbytes(placed))
        return placed

    def _rng(self, purpose: str, task: Task, device: str | None, number: int = 0) -> torch.Generator:
        return torch_stream(purpose, self.seed, task.index, number, device=device or self.backbone.device)
