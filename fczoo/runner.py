"""One run: a method learns the tasks of a stream over simulated clients and is evaluated after each."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from . import __version__
from .backbone import Backbone
from .core import Context, Method, Task, Tree, drop, nbytes, select
from .data import Stream, make_stream
from .engine import Client, Divergence, Engine, Plan, broadcast
from .errors import FczooError
from .evaluate import accuracy_row
from .images import ImageStore, get_augment
from .metrics import all_metrics
from .options import build, check_options, option
from .partition import Partition, make_partition
from .registry import AGGREGATORS, DATASETS, METHODS
from .seeds import numpy_stream, torch_stream
from .weights import load_backbone

TOGETHER_LIMIT = 4_000_000  # trained scalars a client, above which clients train one at a time unless told otherwise
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the method. ``for_dataset`` fills in a data set's own schedule."""

    dataset: str = option("digits", "registered data set")
    data_root: str | None = option(None, "folder that holds the data; none: FCZOO_HOME/data")
    backbone: str = option("vit_nano_32", "name, weight file, or NAME:FILE")
    image_size: int | None = option(None, "input size; none: the checkpoint's own", low=1)
    mean: tuple[float, ...] | None = option(None, "input mean; none: the checkpoint's own")
    std: tuple[float, ...] | None = option(None, "input standard deviation; none: the checkpoint's own")
    partition: str = option("dirichlet:0.5", "partitioner, or file:PATH of a saved partition")
    tasks: int = option(5, "tasks into which the classes are cut", low=1)
    clients: int = option(5, "clients", low=1)
    participation: float = option(1.0, "part of the clients that train in a round", low=0, high=1)
    rounds: int = option(3, "rounds a task", low=1)
    epochs: int = option(2, "local epochs a round", low=1)
    batch_size: int = option(16, "local batch size", low=1)
    augment: str = option("none", "random view of the training images")
    cache_queries: bool = option(False, "keep query features of the test view in training, too, instead of one forward a step")
    train_per_class: int | None = option(None, "first training images of each class; none: all", low=1)
    test_per_class: int | None = option(None, "first test images of each class; none: all", low=1)
    class_order_seed: int | None = option(None, "none: natural class order", low=0)
    partition_seed: int = option(0, "seed of the split over clients", low=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "auto: cuda, else mps, else cpu")
    precision: Literal["fp32", "bf16", "fp64"] = option("fp32", "type in which the frozen weights are held and computed")
    together: Literal["auto"] | int = option("auto", "clients in one forward; auto: 1 on the CPU", low=1)
    aggregator: str | None = option(None, "aggregator of whatever a method averages; none: the method's own")

    def __post_init__(self) -> None:
        check_options(self)

    def portable(self) -> dict[str, Any]:
        """As plain values, files and folders by their last name: where they lay is nobody else's business."""
        return {k: shorten(v) if k in ("data_root", "backbone", "partition") else v for k, v in asdict(self).items()}

    @staticmethod
    def for_dataset(dataset: str, **changes: Any) -> "Settings":
        """The data set's own schedule, changed where a value other than None is given.

        Raises FczooError for unknown names and values that do not fit.
        """
        defaults = asdict(DATASETS.get(dataset).defaults)
        return build(Settings, "bench", {"dataset": dataset, **defaults, **{k: v for k, v in changes.items() if v is not None}})


@dataclass
class Result:
    """What a run found out. ``accuracy[t][i]``: percent on task i after task t."""

    method: str
    options: dict[str, Any]
    settings: dict[str, Any]
    seed: int
    backbone: dict[str, Any]
    partition: dict[str, Any]
    class_order: list[int]
    task_sizes: list[int]
    test_counts: list[int]
    trained_scalars: int = 0
    accuracy: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0  # all uploads
    bytes_down: int = 0  # all broadcasts; a tensor that a client already has is not sent again
    client_rounds: int = 0  # uploads
    seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes
    versions: dict[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Is told how a run gets on."""

    def start(self, method: Method, seed: int, clients: int, rounds: int) -> None: ...
    def client(self, task: int, round: int, loss: float) -> None: ...
    def round(self, record: dict[str, Any]) -> None: ...
    def task(self, result: Result) -> None: ...


class Silent:
    """The observer that says nothing."""

    def start(self, method: Method, seed: int, clients: int, rounds: int) -> None:
        """A run begins: ``clients`` clients, ``rounds`` rounds over all tasks."""

    def client(self, task: int, round: int, loss: float) -> None:
        """A client has trained."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""

    def task(self, result: Result) -> None:
        """A task is over and evaluated."""


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
        root = Path(settings.data_root).expanduser() if settings.data_root else None
        s = settings
        stream = make_stream(s.dataset, root, s.tasks, s.class_order_seed, s.train_per_class, s.test_per_class)
        partition = make_partition(stream, s.partition, s.clients, s.partition_seed)
        backbone = load_backbone(s.backbone, image_size=s.image_size, mean=s.mean, std=s.std).to(device, dtype)
        return Bench(settings, stream, partition, backbone, ImageStore(stream.train, backbone), ImageStore(stream.test, backbone))

    def clients(self, task: Task) -> list[Client]:
        """The clients that hold data of a task."""
        where = {int(original): i for i, original in enumerate(self.stream.train_index)}
        owned = self.partition.tasks[task.index]
        return [Client(k, torch.tensor([where[int(i)] for i in index])) for k, index in enumerate(owned) if len(index)]

    def check(self, method: Method) -> None:
        """Raise FczooError where ``method`` cannot start on this backbone, before anything is run or written."""
        AGGREGATORS.get(self.settings.aggregator or method.averaging)
        method.begin_task({}, self.stream.tasks[0], self.backbone, torch.Generator())

    def run(self, method: Method, seed: int = 0, observer: Observer | None = None) -> Result:
        """Train ``method`` over all tasks. The same settings and seed give the same result on the same device."""
        return _Run(self, method, seed, observer or Silent()).run()


def run(method: Method, *, seed: int = 0, observer: Observer | None = None, dataset: str = "digits", **settings: Any) -> Result:
    """Run one method: ``fczoo.run(fczoo.create_method("pilora", rank=8), dataset="digits", rounds=2)``.

    ``settings`` are the fields of ``Settings``; those not given follow the data set's defaults.
    """
    return Bench.open(Settings.for_dataset(dataset, **settings)).run(method, seed, observer)


def create_method(name: str, dataset: str | None = None, **options: Any) -> Method:
    """Method by name; options beat the method's values for ``dataset``, which beat its defaults."""
    cls = METHODS.get(name)
    return build(cls, name, {**cls.tuned.get(dataset, {}), **options})


def shorten(word: str | None) -> str | None:
    """``NAME:FOLDER/FILE`` -> ``NAME:FILE``; words without a folder as they are."""
    if word is None or "/" not in word:
        return word
    before, _, last = word.rstrip("/").rpartition("/")
    name, colon, _ = before.partition(":")
    return f"{name}:{last}" if colon else last


def pick_device(name: str) -> torch.device:
    """Device by name. Raises FczooError when it is not there."""
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(d for d in ("cuda", "mps", "cpu") if found[d])
    if not found[name]:
        raise FczooError(f"no {name} device on this machine; found: {', '.join(d for d, here in found.items() if here)}")
    return torch.device(name)


class _Run:
    """The rounds of one run."""

    def __init__(self, bench: Bench, method: Method, seed: int, observer: Observer):
        self.bench, self.method, self.seed, self.observer = bench, method, seed, observer
        self.settings, self.stream, self.backbone = bench.settings, bench.stream, bench.backbone
        self.average = AGGREGATORS.get(self.settings.aggregator or method.averaging)
        self.rounds = self.settings.rounds if method.optims() else 0
        self.state: Tree = {}
        self.version: dict[str, int] = {}  # state name -> how often it has changed
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
            versions=versions(),
        )

    def run(self) -> Result:
        begin = time.perf_counter()
        if self.backbone.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.observer.start(self.method, self.seed, self.settings.clients, self.rounds * len(self.stream.tasks))
        for task in self.stream.tasks:
            self._learn(task)
            batch = 256 if self.backbone.device.type == "cuda" else 64
            self.result.accuracy.append(accuracy_row(self.method, self.bench.test, self.state, self.stream, task, batch))
            self.result.metrics = all_metrics(self.result.accuracy, self.result.test_counts)
            self.result.seconds = time.perf_counter() - begin
            self.result.peak_memory = peak_memory(self.backbone.device)
            self.observer.task(self.result)
        return self.result

    def _learn(self, task: Task) -> None:
        clients = self.bench.clients(task)
        self.state = self._place(self.method.begin_task(self.state, task, self.backbone, self._rng("begin", task, "cpu")))
        trained = tuple(self.method.optims())
        self.result.trained_scalars = sum(v.numel() for v in select(self.state, *trained).values()) if trained else 0
        engine = Engine(self.method, self.backbone, self.bench.train, self._plan())
        self._survey("begin", engine, clients, task)
        for number in range(self.rounds):
            started = time.perf_counter()
            present = self._participants(clients, task, number)
            down = self._send(present)
            shared = broadcast(self.method, self.state)
            losses: list[float] = []

            def tick(loss: float, number: int = number, losses: list[float] = losses) -> None:
                losses.append(loss)
                self.observer.client(task.index, number, loss)

            payloads = engine.train(self.state, present, Context(task, number, self.rounds, shared), tick)
            up = self._receive(payloads)
            merged = self._aggregate(payloads)
            self.state = self._place(self.method.server_update(self.state, merged, task, self._rng("server", task, None, number)))
            self.observer.round(
                {
                    "task": task.index,
                    "round": number,
                    "clients": [c.number for c in present],
                    "loss": sum(losses) / len(losses),
                    "bytes_up": up,
                    "bytes_down": down,
                    "seconds": time.perf_counter() - started,
                }
            )
        self._survey("end", engine, clients, task)

    def _survey(self, moment: Literal["begin", "end"], engine: Engine, clients: list[Client], task: Task) -> None:
        """Ask every client with data for sums; they add up, so the server sees them as if the data were in one place."""
        if moment in self.method.surveys():
            self._send(clients)
            payloads = engine.survey(moment, broadcast(self.method, self.state), clients, Context(task, 0, self.rounds, {}))
            self._receive(payloads)
            sums = {k: torch.stack([p[k] for p in payloads]).sum(0) for k in drop(payloads[0], "client")}
            self.state = self._place(self.method.absorb(moment, self.state, sums, task))

    def _plan(self) -> Plan:
        s, accelerated = self.settings, self.backbone.device.type == "cuda"
        together = s.together
        if together == "auto":
            together = s.clients if accelerated and self.result.trained_scalars <= TOGETHER_LIMIT else 1
        return Plan(s.epochs, s.batch_size, get_augment(s.augment), self.seed, together, s.cache_queries, 256 if accelerated else 64)

    def _participants(self, clients: list[Client], task: Task, number: int) -> list[Client]:
        """Clients of a round, drawn from those that hold data of the task: at least one."""
        count = max(1, round(self.settings.participation * len(clients)))
        chosen = numpy_stream("participation", self.seed, task.index, number).choice(len(clients), count, replace=False)
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
        return placed

    def _rng(self, purpose: str, task: Task, device: str | None, number: int = 0) -> torch.Generator:
        return torch_stream(purpose, self.seed, task.index, number, device=device or self.backbone.device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest resident set of this process so far and, on CUDA, of the allocator since the run began; bytes."""
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {**peak, "cuda": torch.cuda.max_memory_allocated()} if device.type == "cuda" else peak


def versions() -> dict[str, str]:
    """Versions that can change a number."""
    import platform

    import numpy
    import timm
    import torchvision

    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": numpy}
    return {"fczoo": __version__, "python": platform.python_version(), **{k: m.__version__ for k, m in modules.items()}}
