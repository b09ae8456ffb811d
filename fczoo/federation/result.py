"""Result of a run."""

import html
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, Number, read_record, write_record
from fczoo.core.metrics import all_metrics

FORMAT = "fczoo-result-1"


@dataclass(repr=False)
class Result:
    """Result of a run.

    ``accuracy[t][i]`` is the percentage on task i after task t; NaN without test images.
    """

    method: str
    options: dict[str, Any]
    settings: dict[str, Any]
    seed: Count
    backbone: dict[str, Any]
    partition: dict[str, Any]
    class_order: list[int]
    task_sizes: list[Count]
    test_counts: list[Count]
    trained_scalars: Count = 0
    remark: str = ""  # what a reader must know of the method as it ran
    accuracy: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: Count = 0  # all uploads
    bytes_down: Count = 0  # all broadcasts; a tensor that a client already has is not sent again
    client_rounds: Count = 0  # uploads
    # bytes_up by what they tell of a client's data (core.Content)
    uploaded: dict[str, Count] = field(default_factory=dict)
    # uploads turned away, in whole or part, or lost: task, moment, client, reason
    rejected: list[dict[str, Any]] = field(default_factory=list)
    # client -> uploads whose class statistics were far from the other clients' and were used all
    # the same
    far: dict[str, Count] = field(default_factory=dict)
    # epsilon and delta of a client's uploads, where they are noisy
    privacy: dict[str, Number] = field(default_factory=dict)
    seconds: Number = 0.0
    phases: dict[str, Number] = field(
        default_factory=dict
    )  # seconds in surveys, training, server, evaluation
    # bytes of a client next to backbone and images of the task, at most
    client_storage: Count | None = None
    server_storage: Count | None = None  # bytes of the server's whole state, at most
    # bytes: "cuda" and "run" are of this run only, "process" (older files) of all runs of the
    # process
    peak_memory: dict[str, Count] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        figures = [
            f"{name} {self.metrics[name]:.1f}" for name in ("A_N", "Avg") if name in self.metrics
        ]
        run = f"{self.method}, seed {self.seed} on {self.settings.get('dataset', 'no data set')}"
        return f"<Result of {run}: {', '.join(figures) or 'no task learned yet'}>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{self.table('html')}"

    def table(self, style: str = "simple") -> str:
        """Format the accuracy in %, per task (columns), after each task (rows).

        ``style`` is one of tabulate.
        """
        rows = [[t + 1, *(f"{a:.1f}" for a in row)] for t, row in enumerate(self.accuracy)]
        head = ["after task", *(f"on task {i + 1}" for i in range(len(self.task_sizes)))]
        return tabulate(rows, head, tablefmt=style, disable_numparse=True)

    def save(self, path: str | Path) -> None:
        """Write a JSON file that ``load_results`` reads. Raises FczooError for another suffix."""
        if Path(path).suffix != ".json" or Path(path).is_dir():
            raise FczooError(f"{path} is not the name of a JSON file; give a name such as run.json")
        write_result(Path(path), self)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        begin = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin

    @property
    def is_finished(self) -> bool:
        """Return whether every task is learned and evaluated."""
        return len(self.accuracy) == len(self.task_sizes)


KNOWN_AT_START = (
    "method",
    "options",
    "settings",
    "seed",
    "backbone",
    "partition",
    "class_order",
    "task_sizes",
    "test_counts",
    "remark",
    "versions",
)
METRIC_FIELDS = "accuracy", "metrics"  # fields whose numbers may be NaN, which JSON has as null
PROGRESS = tuple(f.name for f in fields(Result) if f.name not in KNOWN_AT_START)
"""The fields that a run fills in as it continues; the others are known when it begins."""


def write_result(path: Path, result: Result) -> None:
    """Write a run's ``result.json``, with its format's version and a checksum."""
    write_record(path, FORMAT, {"finished": result.is_finished, **asdict(result)})


def read_result(path: Path) -> Result:
    """Read a ``result.json`` and compute its metrics again.

    A file that has not changed is read once per process: progress, tables and archives of one
    command share the result. Fields that an older file lacks keep their defaults.

    Args:
        path: The file.

    Raises:
        FczooError: The file is not a result, or its fields contradict each other.
    """
    try:
        status = path.stat()
    except OSError:
        return _read_version(path, (0, 0, 0))
    return replace(_read_version(path, (status.st_ino, status.st_mtime_ns, status.st_size)))


@lru_cache(4096)  # the runs of a large archive
def _read_version(path: Path, version: tuple[int, int, int]) -> Result:
    """Read the ``version`` of a file: its inode, modification time and size."""
    again = "remove it, and the same bench command makes this run again"
    try:
        return consistent(read_record(path, "result file", Result, FORMAT, METRIC_FIELDS))
    except FczooError as error:
        raise FczooError(f"{error}; {again}") from error
    except ValueError as error:
        raise FczooError(f"{path} is not a valid result file: {error}; {again}") from error


def consistent(result: Result) -> Result:
    """Return a result from a file with metrics computed from its accuracies.

    Raises ValueError where parts of it contradict each other, such as a metric and the accuracies.
    """
    tasks, rows = len(result.task_sizes), [len(row) for row in result.accuracy]
    if (
        not tasks
        or len(result.test_counts) != tasks
        or rows != list(range(1, len(rows) + 1))
        or len(rows) > tasks
    ):
        raise ValueError(
            f"{tasks} tasks do not go with {len(result.test_counts)} numbers of test images "
            f"and rows of {rows} accuracies"
        )
    if not sum(result.test_counts):
        raise ValueError("its tasks have no test images at all")
    for row in result.accuracy:
        if not all(math.isnan(value) or 0 <= value <= 100 for value in row):
            raise ValueError("accuracy: a value is not a percentage")
    if not all(isinstance(r.get("reason"), str) for r in result.rejected):
        raise ValueError("rejected: an upload is rejected without a reason")
    metrics = all_metrics(result.accuracy, result.test_counts) if rows else {}
    for name, metric in metrics.items():
        written = result.metrics.get(name, metric)
        is_legacy = math.isnan(written) and not all(
            result.test_counts
        )  # as older versions wrote it then
        if not (is_legacy or math.isclose(written, metric, abs_tol=1e-6)):
            raise ValueError(f"metrics.{name} is {written:g}, but its accuracies give {metric:g}")
    result.metrics = metrics
    return result
