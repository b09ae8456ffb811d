"""Tables of experiments: their entries and the marks of the best values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from fczoo.core.metrics import METRICS
from fczoo.core.names import match
from fczoo.core.payload import Content
from fczoo.federation.result import Result
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import DIGITS, Entry, Mark, significant
from fczoo.security.privacy import DISCLOSURES


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
    """Format with one decimal, never -0.0.

    Args:
        value: Percentage or difference in points.
    """
    return f"{round(value, 1) + 0.0:.1f}"


def thousandths(value: float) -> str:
    """Format with three decimals; small positive numbers do not become 0.

    Args:
        value: Number that is not negative.
    """
    if not value:
        return "0"
    return "<0.001" if value < 0.0005 else f"{value:,.3f}"


def no_decimals(value: float) -> str:
    """Format without decimals, with commas between thousands.

    Args:
        value: Number to round.
    """
    return f"{value:,.0f}"


def _metric(name: str) -> Column:
    better: Literal["high", "low"] = "low" if name.startswith("forgetting") else "high"
    return Column(name, MEANINGS[name], lambda r: r.metrics[name], percent, better)


def _per_upload(total: int, result: Result) -> float:
    return total / max(result.client_rounds, 1) / 1e6


def _upload_of(result: Result, content: Content) -> float | None:
    return _per_upload(result.uploaded.get(content, 0), result) if result.uploaded else None


def _megabytes(size: float | None) -> float | None:
    return None if size is None else size / 1e6


def _peak(result: Result) -> float | None:
    """Return the peak memory of a run; older files only have that of a process."""
    return _megabytes(result.peak_memory.get("cuda", result.peak_memory.get("run")))


def _content(content: Content, tells: str) -> Column:
    meaning = f"MB of a client's upload in a round that disclose {tells}"
    return Column(content, meaning, partial(_upload_of, content=content), thousandths)


ACCURACY = tuple(map(_metric, METRICS))
COSTS = (
    Column(
        "MB up",
        "a client's upload in a round (1 MB = 10^6 bytes)",
        lambda r: _per_upload(r.bytes_up, r),
        thousandths,
    ),
    Column(
        "MB down",
        "a client's download in a round",
        lambda r: _per_upload(r.bytes_down, r),
        thousandths,
    ),
    Column(
        "MB sent",
        "everything that is sent in the run, by all clients and to them",
        lambda r: (r.bytes_up + r.bytes_down) / 1e6,
        thousandths,
    ),
    Column("trained", "trained parameters of a client", lambda r: r.trained_scalars, no_decimals),
    Column(
        "client MB",
        "what a client holds next to the backbone and its images of the task",
        lambda r: _megabytes(r.client_storage),
        thousandths,
    ),
    Column(
        "server MB",
        "what the server holds next to the backbone",
        lambda r: _megabytes(r.server_storage),
        thousandths,
    ),
    Column("seconds", "of a run, evaluation included", lambda r: r.seconds, no_decimals),
    Column(
        "peak MB",
        "largest memory in the run: of the GPU or, without one, of the process",
        _peak,
        no_decimals,
    ),
)
UPLOADS = (
    *(_content(content, tells) for content, tells in DISCLOSURES.items()),
    Column(
        "rejected",
        "uploads that were turned away, in whole or in part, or never came",
        lambda r: len(r.rejected),
        no_decimals,
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


@dataclass(frozen=True)
class Table:
    """Rows of entries; None where the runs did not record a figure."""

    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    seeds: tuple[int, ...]  # number of seeds of each row
    rows: tuple[tuple[Entry | None, ...], ...]


def make_table(experiment: Experiment, names: Sequence[str]) -> Table:
    """Return the named columns of an experiment with marks.

    Args:
        experiment: Experiment with the rows.
        names: Names of columns, keys of ``COLUMNS``.
    """
    columns = tuple(COLUMNS[match(n, COLUMNS) or n] for n in names)
    lines = experiment.lines
    by_column = []
    for column in columns:
        entries = [entry_of(line, column) for line in lines]
        competing = [e if line.competes else None for e, line in zip(entries, lines, strict=True)]
        marked_entries = mark_entries(competing, column)
        by_column.append(
            [mark or entry for mark, entry in zip(marked_entries, entries, strict=True)]
        )
    rows = tuple(zip(*by_column, strict=True))
    return Table(columns, tuple(x.label for x in lines), tuple(len(x.records) for x in lines), rows)


def entry_of(line: Line, column: Column) -> Entry | None:
    """Return one figure of one line; None if no run recorded it.

    Args:
        line: Row of a table.
        column: Column with the figure.
    """
    by_seed = {}
    for seed, result in zip(line.seeds, line.results, strict=True):
        value = column.value(result)
        if value is not None and not math.isnan(value):
            by_seed[seed] = float(value)
    return Entry(by_seed) if by_seed else None


def mark_entries(entries: Sequence[Entry | None], column: Column) -> list[Entry | None]:
    """Mark entries: best, second, not significantly different from the best, not tested against it.

    Equal means share a rank, and the ranks after it are left out: two best methods leave no second.
    Means are equal if they agree to ``DIGITS`` decimals, not as they are printed.

    Args:
        entries: Column of a table; None: not recorded or not ranked.
        column: Its figure; that of a cost, which is not ranked, gets no marks.
    """
    measurements = [e for e in entries if e is not None]
    if not column.better or len(measurements) < 2:
        return list(entries)
    means = sorted((round(e.mean, DIGITS) for e in measurements), reverse=column.better == "high")
    best = [e for e in measurements if round(e.mean, DIGITS) == means[0]]
    many_seeds = any(len(e.by_seed) > 1 for e in measurements)
    marks: dict[int, Mark] = {0: "best", 1: "second"}
    out: list[Entry | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        rank = means.index(round(entry.mean, DIGITS))
        tests = (significant(best_entry, entry) for best_entry in best) if rank > 0 else iter(())
        differs = next((result for result in tests if result is not None), None)
        lacks_test = rank > 0 and many_seeds and differs is None
        out.append(Entry(entry.by_seed, marks.get(rank, ""), differs, lacks_test))
    return out
