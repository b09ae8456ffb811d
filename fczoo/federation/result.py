"""What a run leaves behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fczoo.core.errors import FczooError
from fczoo.core.files import read_json
from fczoo.core.metrics import METRICS

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
    uploaded: dict[str, int] = field(
        default_factory=dict
    )  # bytes_up by what they tell of a client's data (core.Content)
    rejected: list[dict[str, Any]] = field(
        default_factory=list
    )  # uploads turned away, in whole or part, or lost: task, moment, client, reason
    privacy: dict[str, float] = field(
        default_factory=dict
    )  # epsilon and delta of a client's uploads, where they are noisy
    seconds: float = 0.0
    phases: dict[str, float] = field(
        default_factory=dict
    )  # seconds in surveys, training, server and evaluation
    client_storage: int | None = (
        None  # bytes that a client holds beside the backbone and its images of the task, at most
    )
    server_storage: int | None = None  # bytes of the server's whole state, at most
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes
    versions: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a phase."""
        begin = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin


GIVEN = (
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
PROGRESS = tuple(f.name for f in fields(Result) if f.name not in GIVEN)
"""The fields that a run fills in as it goes on; the others are known when it begins."""


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
    if (
        not tasks
        or len(result.test_counts) != tasks
        or rows != list(range(1, len(rows) + 1))
        or len(rows) > tasks
    ):
        return f"{tasks} tasks do not go with {len(result.test_counts)} numbers of test images and rows of {rows} accuracies"
    if any(n < 0 for n in (*result.task_sizes, *result.test_counts)) or not sum(result.test_counts):
        return "its tasks have negative sizes, or no test images at all"
    if rows and (missing := METRICS.keys() - result.metrics.keys()):
        return f"it lacks the metric {min(missing)}"
    return (
        ""
        if all(isinstance(r.get("reason"), str) for r in result.rejected)
        else "an upload is rejected without a reason"
    )


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
    return isinstance(value, (int, float) if kind is float else kind) and (
        kind is bool or not isinstance(value, bool)
    )
