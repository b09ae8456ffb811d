"""The columns of tables: one figure of a run each, with what it means and which direction is better."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from fczoo.core.metrics import METRICS
from fczoo.core.payload import Content
from fczoo.federation.result import Result
from fczoo.security.privacy import DISCLOSES


class Column(NamedTuple):
    """One figure of a run."""

    name: str
    meaning: str
    value: Callable[[Result], float | None]
    show: Callable[[float], str]
    better: Literal["high", "low", ""] = ""  # "": a cost, which is not ranked


MEANINGS = {
    "A_N": "% of the test images of all seen classes that are recognised, after the last task",
    "Avg": "mean of that over the tasks",
    "FAA": "mean of the tasks' accuracies after the last task",
    "Abar": "mean over time of the means over the tasks seen",
    "forgetting": "mean drop of old tasks from their best before the end",
    "forgetting_first": "mean drop since a task was learned, last task counted",
    "forgetting_best": "mean drop from the best, last row and last task counted",
    "BWT": "mean change of old tasks since they were learned",
}


def percent(value: float) -> str:
    """One decimal, never -0.0."""
    return f"{round(value, 1) + 0.0:.1f}"


def thousandths(value: float) -> str:
    """Three decimals; a few bytes are not nothing."""
    if not value:
        return "0"
    return "<0.001" if value < 0.0005 else f"{value:,.3f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def _metric(name: str) -> Column:
    better: Literal["high", "low"] = "low" if name.startswith("forgetting") else "high"
    return Column(name, MEANINGS[name], lambda r: r.metrics[name], percent, better)


def _per_upload(total: int, result: Result) -> float:
    return total / max(result.client_rounds, 1) / 1e6


def _uploaded(result: Result, content: Content) -> float | None:
    return _per_upload(result.uploaded.get(content, 0), result) if result.uploaded else None


def _megabytes(size: float | None) -> float | None:
    return None if size is None else size / 1e6


def _peak(result: Result) -> float | None:
    """Of the run alone; what older files have of the whole process says nothing about one run."""
    return _megabytes(result.peak_memory.get("cuda", result.peak_memory.get("run")))


def _content(content: Content, tells: str) -> Column:
    meaning = f"MB of a client's upload in a round that tell the server {tells}"
    return Column(content, meaning, partial(_uploaded, content=content), thousandths)


ACCURACY = tuple(map(_metric, METRICS))
COSTS = (
    Column(
        "MB up",
        "a client's upload in a round (1 MB = 10^6 bytes)",
        lambda r: _per_upload(r.bytes_up, r),
        thousandths,
    ),
    Column("MB down", "a client's download in a round", lambda r: _per_upload(r.bytes_down, r), thousandths),
    Column(
        "MB sent",
        "everything that is sent in the run, by all clients and to them",
        lambda r: (r.bytes_up + r.bytes_down) / 1e6,
        thousandths,
    ),
    Column("trained", "trained parameters of a client", lambda r: r.trained_scalars, whole),
    Column(
        "client MB",
        "what a client holds beside the backbone and its images of the task",
        lambda r: _megabytes(r.client_storage),
        thousandths,
    ),
    Column(
        "server MB",
        "what the server holds beside the backbone",
        lambda r: _megabytes(r.server_storage),
        thousandths,
    ),
    Column("seconds", "of a run, evaluation included", lambda r: r.seconds, whole),
    Column("peak MB", "largest memory in the run: of the GPU or, without one, of the process", _peak, whole),
)
UPLOADS = (
    *(_content(content, tells) for content, tells in DISCLOSES.items()),
    Column(
        "rejected",
        "uploads that were turned away, in whole or in part, or never came",
        lambda r: len(r.rejected),
        whole,
    ),
    Column(
        "epsilon",
        "of (epsilon, delta)-differential privacy of a client's uploads",
        lambda r: r.privacy.get("epsilon"),
        "{:.2f}".format,
    ),
)
COLUMNS = {c.name: c for c in (*ACCURACY, *COSTS, *UPLOADS)}
GROUPS = tuple(tuple(c.name for c in group) for group in (ACCURACY, COSTS, UPLOADS))
SHORT = ("A_N", "Avg", "FAA", "forgetting", "MB up", "seconds")
