"""What a run leaves behind and whom it tells."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import torch

from . import __version__
from .core import Method
from .errors import FczooError
from .files import write_safely
from .identity import code_sha256
from .metrics import METRICS

LARGEST = 2**63  # no number that a run writes is that large


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
    remark: str = ""  # what a reader must know of the method as it ran
    accuracy: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0  # all uploads
    bytes_down: int = 0  # all broadcasts; a tensor that a client already has is not sent again
    client_rounds: int = 0  # uploads
    uploaded: dict[str, int] = field(default_factory=dict)  # bytes_up by what they tell of a client's data (core.Content)
    rejected: list[dict[str, Any]] = field(default_factory=list)  # uploads turned away, in whole or part, or lost: task, moment, client, reason
    privacy: dict[str, float] = field(default_factory=dict)  # epsilon and delta of a client's uploads, where they are noisy
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds in surveys, training, server and evaluation
    client_storage: int | None = None  # bytes that a client holds beside the backbone and its images of the task, at most
    server_storage: int | None = None  # bytes of the server's whole state, at most
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes
    versions: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a phase."""
        begin = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin


GIVEN = ("method", "options", "settings", "seed", "backbone", "partition", "class_order", "task_sizes", "test_counts", "remark", "versions")
PROGRESS = tuple(f.name for f in fields(Result) if f.name not in GIVEN)
"""The fields that a run fills in as it goes on; the others are known when it begins."""


class Observer(Protocol):
    """Is told how a run gets on."""

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None: ...
    def client(self, task: int, round: int, loss: float) -> None: ...
    def round(self, record: dict[str, Any]) -> None: ...
    def task(self, result: Result) -> None: ...


class Silent:
    """The observer that says nothing."""

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        """A run begins or goes on: ``clients`` clients, ``rounds`` rounds over all tasks, ``done`` of them done before."""

    def client(self, task: int, round: int, loss: float) -> None:
        """A client has trained."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""

    def task(self, result: Result) -> None:
        """A task is over and evaluated."""


class Several:
    """Several observers as one: each is told everything, in order."""

    def __init__(self, observers: Sequence[Observer]):
        self.observers = observers

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        for observer in self.observers:
            observer.start(method, seed, clients, rounds, done)

    def client(self, task: int, round: int, loss: float) -> None:
        for observer in self.observers:
            observer.client(task, round, loss)

    def round(self, record: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.round(record)

    def task(self, result: Result) -> None:
        for observer in self.observers:
            observer.task(result)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    write_safely(path, (json.dumps(content, indent=1) + "\n").encode())


def plain(content: Any) -> Any:
    """What a reader of its JSON gets: tuples as lists."""
    return json.loads(json.dumps(content))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object. Raises FczooError, calling the file ``what``, when it is missing or something else."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise FczooError(f"no {what} at {path}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error
    if not isinstance(content, dict):
        raise FczooError(f"{path} is no valid {what}: it holds no JSON object")
    return content


def read_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """The JSON objects of a file with one a line; none where there is no such file. Raises FczooError for anything else."""
    try:
        content = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error
    if not all(isinstance(line, dict) for line in content):
        raise FczooError(f"{path} is no valid {what}: it holds no JSON object in every line")
    return content


def read_result(path: Path) -> Result:
    """A run's ``result.json``; what older versions did not write keeps its default. Raises FczooError when it is no result."""
    content = read_json(path, "result file")
    try:
        hints = get_type_hints(Result)
        given = {f.name: content[f.name] for f in fields(Result) if f.name in content}
        if wrong := [k for k, v in given.items() if not fits(v, hints[k])]:
            raise ValueError(f"{wrong[0]} is {repr(given[wrong[0]])[:60]}")
        result = Result(**given)
        if fault := _fault(result):
            raise ValueError(fault)
    except (ValueError, TypeError) as error:
        raise FczooError(f"{path} is no valid result file: {error}") from error
    return result


def _fault(result: Result) -> str:
    """What contradicts itself in a result; empty where nothing does."""
    tasks, rows = len(result.task_sizes), [len(row) for row in result.accuracy]
    if not tasks or len(result.test_counts) != tasks or rows != list(range(1, len(rows) + 1)) or len(rows) > tasks:
        return f"{tasks} tasks do not go with {len(result.test_counts)} numbers of test images and rows of {rows} accuracies"
    if any(n < 0 for n in (*result.task_sizes, *result.test_counts)) or not sum(result.test_counts):
        return "its tasks have negative sizes, or no test images at all"
    if rows and (missing := METRICS.keys() - result.metrics.keys()):
        return f"it lacks the metric {min(missing)}"
    return "" if all(isinstance(r.get("reason"), str) for r in result.rejected) else "an upload is rejected without a reason"


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON has a type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is UnionType:
        return any(fits(value, h) for h in inner)
    if kind is list:
        return isinstance(value, list) and all(fits(v, inner[0]) for v in value)
    if kind is dict:
        return isinstance(value, dict) and all(fits(v, inner[1]) for v in value.values())
    if isinstance(value, int | float) and abs(value) >= LARGEST:  # infinity, too
        return False
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def hardware() -> dict[str, Any]:
    """What the times were measured on: processor, cores that this process may use, graphics processors."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next((line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")), name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


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
    import numpy
    import timm
    import torchvision

    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": numpy}
    return {"fczoo": __version__, "code": code_sha256(), "python": platform.python_version(), **{k: m.__version__ for k, m in modules.items()}}
