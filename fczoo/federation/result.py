"""Result of a run."""

import html
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fczoo.core.class_metrics import CLIENT_METRICS, class_accuracies, confusion_matrix
from fczoo.core.errors import FczooError
from fczoo.core.files import Count, Number, convert_json, read_record, write_record
from fczoo.core.metrics import (
    BASE_METRICS,
    USER_METRICS,
    all_metrics,
    base_accuracy,
    final,
    forward_transfer,
    has_base_task,
    novel_accuracy,
    seen_accuracy,
)
from fczoo.core.options import plural
from fczoo.core.tasks import Task
from fczoo.core.transfer_metrics import TRANSFER_METRICS

FORMAT = "fczoo-result-1"
EVALUATION_METRICS = (
    *("task_aware", "FWT", "top5", "ECE"),
    *(f"{prefix}_{name}" for prefix in ("client", "personal") for name in CLIENT_METRICS),
    *TRANSFER_METRICS,
)
"""Metrics that do not follow from the accuracy matrix."""


@dataclass(frozen=True)
class Evaluation:
    """Outcome of one pass over the test images of all tasks seen so far; NaN without images."""

    accuracy: list[float]  # percent, per task
    task_aware: list[float]  # percent, per task, with the answer among the classes of the task
    top5: float  # percent, over all images
    calibration: float | None  # ECE over all images; None: the method gives scores
    confusion: list[list[int]]  # class, answer, images
    class_accuracy: list[float]  # percent, per class seen
    # percent, per client, on test images with its class mix; None without images; empty: not known
    client_accuracy: list[float | None]
    next_accuracy: float | None  # percent, on the next task; None where it has new classes
    # percent, per client-task that has begun (``client_tasks``); empty without stages
    client_task_accuracy: list[float | None] = field(default_factory=list)


@dataclass(repr=False)
class Result:
    """Result of a run; ``fczoo show result`` lists its fields with meaning, unit and default.

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
    # for a run that starts from a kept model: the model, its number of tasks, and the SHA-256 of
    # its tensors; else empty
    start: dict[str, Any] = field(default_factory=dict)
    accuracy: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    # the same, with predictions among the classes of the image's task
    task_aware: list[list[float]] = field(default_factory=list)
    # after task t: percentage on task t + 1; None if it has new classes
    next_accuracy: list[float | None] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)  # after task t: percentage, all images seen
    # after task t: ECE in points, all images seen; empty if a method gives scores, not logits
    calibration: list[float] = field(default_factory=list)
    # after task t: percentage per class seen; NaN without test images
    class_accuracy: list[list[float]] = field(default_factory=list)
    # after the latest task: class, predicted class, number of images
    confusion: list[list[Count]] = field(default_factory=list)
    # after the latest task: percentage per client on test images with the class mix of its images;
    # None without images; empty if the server does not know the mixes
    client_accuracy: list[float | None] = field(default_factory=list)
    # client, first and last stage of each task of each client, if clients are in different tasks;
    # and after stage s: percentage per client-task that has begun, on test images with its classes
    client_tasks: list[list[Count]] = field(default_factory=list)
    client_task_accuracy: list[list[float | None]] = field(default_factory=list)
    # after the last task: the same for its own model, after ``personal_epochs`` of fine-tuning
    personal_accuracy: list[float | None] = field(default_factory=list)
    # task, rounds of it, accuracy over all classes seen, bytes sent so far: after every task, and
    # after every ``eval_every`` rounds
    curve: list[list[Any]] = field(default_factory=list)
    # seconds of the virtual clock at each point of the curve; empty without --client-devices
    curve_seconds: list[Number] = field(default_factory=list)
    virtual_seconds: Number = 0.0  # since the run began
    bytes_up: Count = 0  # all uploads
    bytes_down: Count = 0  # all broadcasts; a tensor that a client already has is not sent again
    client_rounds: Count = 0  # uploads
    # bytes_up by the content that they disclose about a client's data (core.Content)
    uploaded: dict[str, Count] = field(default_factory=dict)
    # uploads rejected in whole or part, or lost: task, moment (round or boundary), client, reason
    rejected: list[dict[str, Any]] = field(default_factory=list)
    # exchanges with too few valid uploads, which left the state unchanged: task, moment, reason.
    # They occur between sites and under attack; other runs end there
    skipped: list[dict[str, Any]] = field(default_factory=list)
    # client -> number of its uploads with class statistics far from the other clients', which were
    # used nevertheless
    far: dict[str, Count] = field(default_factory=dict)
    # epsilon and delta of a client's uploads, if they are noisy
    privacy: dict[str, Number] = field(default_factory=dict)
    seconds: Number = 0.0
    phases: dict[str, Number] = field(
        default_factory=dict
    )  # seconds in surveys, training, server, evaluation
    # largest number of bytes that a client stores, without backbone and images of the task
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
        """Add the time spent inside the context to a phase."""
        begin = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin

    def add_peaks(self, peaks: Mapping[str, int]) -> None:
        """Record the peak memory of this process; keep larger peaks of earlier processes."""
        self.peak_memory = {k: max(v, self.peak_memory.get(k, 0)) for k, v in peaks.items()}

    def add(self, evaluation: Evaluation) -> None:
        """Add the evaluation after a task and compute all metrics."""
        self.accuracy.append(evaluation.accuracy)
        self.task_aware.append(evaluation.task_aware)
        self.next_accuracy.append(evaluation.next_accuracy)
        self.top5.append(evaluation.top5)
        if evaluation.calibration is not None:
            self.calibration.append(evaluation.calibration)
        self.class_accuracy.append(evaluation.class_accuracy)
        self.confusion = evaluation.confusion
        self.client_accuracy = evaluation.client_accuracy
        if self.client_tasks:
            self.client_task_accuracy.append(evaluation.client_task_accuracy)
        self.metrics = metrics_of(self)

    def add_to_curve(self, task: Task, rounds: int, accuracy: float | None = None) -> None:
        """Add a point to the curve after some rounds of a task; by default its final accuracy."""
        if accuracy is None:
            accuracy = seen_accuracy(self.accuracy, self.test_counts, task.index)
        self.curve.append([task.index, rounds, accuracy, self.bytes_up + self.bytes_down])
        if self.settings.get("client_devices"):
            self.curve_seconds.append(self.virtual_seconds)

    def note_skipped(self) -> None:
        """Add the number of exchanges with too few valid uploads, by reason, to the remark."""
        counts = Counter(entry["reason"] for entry in self.skipped)
        notes = [
            f"{plural(count, 'exchange')} with {reason}: the state did not change"
            for reason, count in counts.items()
        ]
        self.remark = "; ".join(filter(None, [self.remark, *notes]))

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
    "client_tasks",
    "versions",
)
METRIC_FIELDS = (
    "accuracy",
    "metrics",
    "task_aware",
    "top5",
    "calibration",
    "class_accuracy",
    "curve",
)
"""Fields whose numbers may be NaN, which JSON has as null."""
PROGRESS = tuple(f.name for f in fields(Result) if f.name not in KNOWN_AT_START)
"""The fields that a run fills in as it continues; the others are known when it begins."""


def metrics_of(result: Result) -> dict[str, float]:
    """Compute every metric of a result by name, without those for which it lacks data."""
    metrics = all_metrics(result.accuracy, result.test_counts)
    if has_base_task(result.task_sizes) and len(result.accuracy) > 1:
        counts = result.test_counts
        metrics |= {k: metric(result.accuracy, counts) for k, metric in BASE_METRICS.items()}
    learned = result.start.get("tasks", 0)
    if 0 < learned < len(result.accuracy):
        metrics["old"] = base_accuracy(result.accuracy, result.test_counts, learned)
        metrics["new"] = novel_accuracy(result.accuracy, result.test_counts, learned)
    if result.task_aware:
        metrics["task_aware"] = final(result.task_aware, result.test_counts)
        metrics["top5"] = result.top5[-1]
        transfer = forward_transfer(result.next_accuracy, len(result.class_order))
        if not math.isnan(transfer):
            metrics["FWT"] = transfer
    if rows := result.client_task_accuracy:
        metrics |= {k: metric(result.client_tasks, rows) for k, metric in TRANSFER_METRICS.items()}
    if result.calibration:
        metrics["ECE"] = result.calibration[-1]
    for prefix, accuracies in (
        ("client", result.client_accuracy),
        ("personal", result.personal_accuracy),
    ):
        if any(value is not None for value in accuracies):
            metrics |= {f"{prefix}_{k}": metric(accuracies) for k, metric in CLIENT_METRICS.items()}
    return metrics


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
    again = "remove it, and start the same bench command to repeat this run"
    try:
        return check_result(read_record(path, "result file", Result, FORMAT, METRIC_FIELDS))
    except FczooError as error:
        raise FczooError(f"{error}; {again}") from error
    except ValueError as error:
        raise FczooError(f"{path} is not a valid result file: {error}; {again}") from error


def check_result(result: Result) -> Result:
    """Return a result from a file with metrics computed from its accuracies.

    Raises ValueError if parts of it contradict each other, such as a metric and the accuracies.
    """
    tasks, rows = len(result.task_sizes), [len(row) for row in result.accuracy]
    if (
        not tasks
        or len(result.test_counts) != tasks
        or rows != list(range(1, len(rows) + 1))
        or len(rows) > tasks
    ):
        raise ValueError(
            f"the lengths do not fit: task_sizes {tasks}, "
            f"test_counts {len(result.test_counts)}, rows of accuracy {rows}"
        )
    convert_json(result.curve, list[tuple[Count, Count, float, Count]])
    convert_json(result.start.get("tasks", 0), Count)
    if len(result.curve_seconds) not in (0, len(result.curve)):
        raise ValueError("curve_seconds: it lacks a point of the curve")
    if not sum(result.test_counts):
        raise ValueError("its tasks have no test images at all")
    for name, values in _percentages(result).items():
        if not all(math.isnan(value) or 0 <= value <= 100 for value in values):
            raise ValueError(f"{name}: a value is not a percentage")
    if not all(isinstance(r.get("reason"), str) for r in result.rejected):
        raise ValueError("rejected: an upload is rejected without a reason")
    _check_evaluations(result)
    metrics = metrics_of(result) if rows else {}
    for name, metric in metrics.items():
        if USER_METRICS.find(name):  # its formula may have changed since
            continue
        written = result.metrics.get(name, metric)
        is_legacy = math.isnan(written) and not all(
            result.test_counts
        )  # as older versions wrote it then
        both_nan = math.isnan(written) and math.isnan(metric)
        if not (is_legacy or both_nan or math.isclose(written, metric, abs_tol=1e-6)):
            raise ValueError(f"metrics.{name} is {written:g}, but its accuracies give {metric:g}")
    if rows and not result.class_accuracy:  # an archive has these metrics without their data
        metrics |= {k: v for k, v in result.metrics.items() if k in EVALUATION_METRICS}
        points = [v for k, v in metrics.items() if not USER_METRICS.find(k)]
        if not all(math.isnan(v) or -100 <= v <= 100 for v in points):
            raise ValueError("metrics: a value is not between -100 and 100")
    result.metrics = metrics
    return result


def _percentages(result: Result) -> dict[str, list[float]]:
    """Return all percentages of a result by field."""
    return {
        "accuracy": [*chain(*result.accuracy)],
        "task_aware": [*chain(*result.task_aware)],
        "next_accuracy": [value for value in result.next_accuracy if value is not None],
        "top5": result.top5,
        "calibration": result.calibration,
        "class_accuracy": [*chain(*result.class_accuracy)],
        "client_accuracy": [value for value in result.client_accuracy if value is not None],
        "personal_accuracy": [value for value in result.personal_accuracy if value is not None],
        "client_task_accuracy": [v for v in chain(*result.client_task_accuracy) if v is not None],
        "curve": [point[2] for point in result.curve],
    }


def _check_evaluations(result: Result) -> None:
    """Raise ValueError if further figures of the evaluations contradict the accuracies.

    Files of older versions have none of them.
    """
    rows = [len(row) for row in result.accuracy]
    figures = (result.task_aware, result.next_accuracy, result.top5, result.class_accuracy)
    if not any(figures) and not result.calibration and not result.confusion:
        return
    lengths = {len(figure) for figure in figures}
    if (
        lengths != {len(rows)}
        or [len(row) for row in result.task_aware] != rows
        or len(result.calibration) not in (0, len(rows))
    ):
        raise ValueError("task_aware, next_accuracy, top5 or class_accuracy lack a task")
    begun = [sum(first <= s for _, first, _ in result.client_tasks) for s in range(len(rows))]
    if result.client_tasks and [len(row) for row in result.client_task_accuracy] != begun:
        raise ValueError("client_task_accuracy lacks a stage or a task of a client")
    classes = len(result.class_accuracy[-1])
    if any(len(entry) != 3 or max(entry[:2]) >= classes for entry in result.confusion):
        raise ValueError(f"confusion: an entry must be two classes below {classes} and a count")
    m = confusion_matrix(result.confusion, classes)
    right, images = int(m.diagonal().sum()), int(m.sum())
    tested = sum(result.test_counts[: len(rows)])  # by the global model, or by each client's own
    if images % tested if tested else images:
        raise ValueError(f"confusion: it counts {images} images, not those of the tasks seen")
    a_n = final(result.accuracy, result.test_counts)
    if images and not math.isclose(100 * right / images, a_n, abs_tol=1e-6):
        raise ValueError(f"confusion: {right} correct predictions, but accuracies give {a_n:g} %")
    for value, recall in zip(class_accuracies(m), result.class_accuracy[-1], strict=True):
        if not math.isclose(value, recall, abs_tol=1e-6) and not math.isnan(value + recall):
            raise ValueError(f"class_accuracy: a value is {recall:g}, but confusion has {value:g}")
