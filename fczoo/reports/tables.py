"""Tables of experiments: columns, entries, and marks of the best values."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from fczoo.core.errors import FczooError
from fczoo.core.metrics import (
    BASE_METRICS,
    METRICS,
    MORE_METRICS,
    USER_METRICS,
    intransigence,
    user_metrics,
)
from fczoo.core.names import match
from fczoo.core.options import nearest
from fczoo.core.payload import Content
from fczoo.core.transfer_metrics import REFERENCE_METRICS, ClientTasks, Rows
from fczoo.federation.result import EVALUATION_METRICS, Result
from fczoo.reports.learning_curves import hours_to, megabytes_to, rounds_to
from fczoo.reports.result_fields import LOWER_IS_BETTER, METRIC_MEANINGS
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import DIGITS, Mark, SeedValues, differ_significantly
from fczoo.security.privacy import DISCLOSURES


class Column(NamedTuple):
    """Column of a table: a metric or cost of a run."""

    name: str
    meaning: str
    value: Callable[[Result], float | None]
    show: Callable[[float], str]
    better: Literal["high", "low", ""] = ""  # "": a cost, which is not ranked
    # for metrics relative to the run of ``reference`` with the same seed
    against: Callable[[Result, Result], float] | None = None
    reference: str = "joint"  # name of a method
    of_all_seeds: bool = False  # whether an entry requires a value of every run


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
    better: Literal["high", "low"] = "low" if name.startswith(LOWER_IS_BETTER) else "high"
    return Column(name, METRIC_MEANINGS[name], partial(_metric_of, name=name), percent, better)


def _metric_of(result: Result, name: str) -> float | None:
    return result.metrics.get(name)


def _relative_to_local(
    result: Result, local_result: Result, metric: Callable[[ClientTasks, Rows, Rows], float]
) -> float:
    """Return a metric relative to the run of ``local``; NaN without tasks of clients."""
    if not result.client_task_accuracy or result.client_tasks != local_result.client_tasks:
        return math.nan
    return metric(
        result.client_tasks, result.client_task_accuracy, local_result.client_task_accuracy
    )


def per_upload(total: float, result: Result) -> float:
    """Return the MB per upload of a client.

    Args:
        total: Bytes of all clients and rounds.
        result: Result of the run.
    """
    return total / max(result.client_rounds, 1) / 1e6


def _upload_of(result: Result, content: Content) -> float | None:
    return per_upload(result.uploaded.get(content, 0), result) if result.uploaded else None


def _megabytes(size: float | None) -> float | None:
    return None if size is None else size / 1e6


def _peak(result: Result) -> float | None:
    """Return the peak memory in MB: of the GPU if it was recorded, else of the process."""
    return _megabytes(result.peak_memory.get("cuda", result.peak_memory.get("run")))


def _content(content: Content, disclosure: str) -> Column:
    meaning = f"MB per round of a client's upload with {content}, which disclose {disclosure}"
    return Column(content, meaning, partial(_upload_of, content=content), thousandths)


ACCURACY = tuple(map(_metric, METRICS))
COSTS = (
    Column(
        "MB up",
        "mean size of a client's upload, over rounds and surveys (1 MB = 10^6 bytes)",
        lambda r: per_upload(r.bytes_up, r),
        thousandths,
    ),
    Column(
        "MB down",
        "mean size of a client's download, over rounds and surveys",
        lambda r: per_upload(r.bytes_down, r),
        thousandths,
    ),
    Column(
        "MB sent",
        "all uploads and downloads of all clients in the run",
        lambda r: (r.bytes_up + r.bytes_down) / 1e6,
        thousandths,
    ),
    Column("trained", "trained parameters of a client", lambda r: r.trained_scalars, no_decimals),
    Column(
        "client MB",
        "largest storage of a client, without the backbone and the images of the task",
        lambda r: _megabytes(r.client_storage),
        thousandths,
    ),
    Column(
        "server MB",
        "largest size of the server's state, without the backbone",
        lambda r: _megabytes(r.server_storage),
        thousandths,
    ),
    Column("seconds", "time of a run, including evaluation", lambda r: r.seconds, no_decimals),
    Column(
        "peak MB",
        "largest memory in the run: of the GPU or, without one, of the process",
        _peak,
        no_decimals,
    ),
)
UPLOADS = (
    *(_content(content, disclosure) for content, disclosure in DISCLOSURES.items()),
    Column(
        "rejected",
        "uploads that were rejected, in whole or in part, or lost",
        lambda r: len(r.rejected),
        no_decimals,
    ),
    Column(
        "epsilon",
        "privacy loss of a client's uploads, of (epsilon, delta)-differential privacy",
        lambda r: r.privacy.get("epsilon"),
        "{:.2f}".format,
    ),
)
OPTIONAL_COLUMNS = (
    *map(_metric, (*MORE_METRICS, *BASE_METRICS, "old", "new", *EVALUATION_METRICS)),
    Column(
        "intransigence",
        "mean accuracy of the joint run on a new task minus the method's, if there is a joint run",
        lambda _: None,
        percent,
        "low",
        lambda r, joint: intransigence(r.accuracy, joint.accuracy, r.test_counts),
    ),
    *(
        Column(
            name,
            METRIC_MEANINGS[name],
            lambda _: None,
            percent,
            "high",
            partial(_relative_to_local, metric=metric),
            "local",
        )
        for name, metric in REFERENCE_METRICS.items()
    ),
    Column(
        "hours",
        "time of a run on the virtual clock, with --client-devices",
        lambda r: r.virtual_seconds / 3600 if r.curve_seconds else None,
        thousandths,
    ),
)
"""Columns that are only shown on request."""
REACH = re.compile(r"(rounds|mb|hours)(?: to |@)(\d+(?:\.\d+)?)(?: ?%)?", re.IGNORECASE)
"""Name of a column of rounds, MB or hours to an accuracy: ``rounds@70`` or ``rounds to 70 %``."""
COLUMNS = {c.name: c for c in (*ACCURACY, *COSTS, *UPLOADS, *OPTIONAL_COLUMNS)}
GROUPS = tuple(tuple(c.name for c in group) for group in (ACCURACY, COSTS, UPLOADS))
SUMMARY_COLUMNS = ("A_N", "Avg", "FAA", "forgetting", "MB up", "seconds")


@dataclass(frozen=True)
class Table:
    """Table of entries; an entry is None if the runs did not record it."""

    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    seeds: tuple[int, ...]  # number of seeds of each row
    rows: tuple[tuple[SeedValues | None, ...], ...]


def all_columns() -> dict[str, Column]:
    """Return all columns by name: ``COLUMNS``, and the metrics that plug-ins register.

    Raises:
        FczooError: A plug-in's metric has the name of another column.
    """
    columns = dict(COLUMNS)
    for name in user_metrics():
        metric = USER_METRICS.get(name)
        if other := match(name, COLUMNS):
            raise FczooError(
                f"metric {name} in {metric.__module__} has the name of the column {other}; "
                "rename it"
            )
        value = partial(_metric_of, name=name)
        columns[name] = Column(
            name, USER_METRICS.about(name).rstrip("."), value, percent, metric.better
        )
    return columns


def make_table(experiment: Experiment, names: Collection[str]) -> Table:
    """Create a table of an experiment with marks of the best values.

    Args:
        experiment: Experiment with the rows.
        names: Names of columns, see ``column_of``.

    Raises:
        FczooError: A name is unknown.
    """
    results = [result for line in experiment.lines for result in line.results]
    if "seconds" in names and any(result.curve_seconds for result in results):
        names = dict.fromkeys((*names, "hours"))  # virtual time in addition to real time
    if "FAA" in names and any(result.start for result in results):
        names = dict.fromkeys(("A_N", "old", "new", *names))
    columns = tuple(column_of(name) for name in names)
    lines = experiment.lines
    references = {c.reference: _results_of(experiment, c.reference) for c in columns}
    by_column = []
    for column in columns:
        entries = [entry_of(line, column, references[column.reference]) for line in lines]
        ranked_entries = [
            e if line.is_ranked else None for e, line in zip(entries, lines, strict=True)
        ]
        marked_entries = mark_entries(ranked_entries, column)
        by_column.append(
            [mark or entry for mark, entry in zip(marked_entries, entries, strict=True)]
        )
    rows = tuple(zip(*by_column, strict=True))
    return Table(columns, tuple(x.label for x in lines), tuple(len(x.records) for x in lines), rows)


def column_of(name: str) -> Column:
    """Return the column of a name; case does not matter, and ``_`` or ``-`` replace blanks.

    Args:
        name: Key of ``all_columns``, or a name such as ``rounds@70``.

    Raises:
        FczooError: The name is unknown.
    """
    if (reach := REACH.fullmatch(name.strip())) and float(reach[2]) <= 100:
        return _reach_column(reach[1].lower(), float(reach[2]))
    if name.strip().lower().startswith(("rounds", "mb@", "mb to", "hours@", "hours to")):
        raise FczooError(
            f"{name!r} is not a metric; give an accuracy from 0 to 100, as in rounds@70 or MB@70"
        )
    columns = all_columns()
    full_name = match(name, columns) or match(re.sub("[_-]", " ", name), columns)
    if full_name is None:
        raise FczooError(f"no metric is called {name!r}; {nearest(name, columns)}")
    return columns[full_name]


def _reach_column(unit: str, accuracy: float) -> Column:
    """Create the column of rounds, MB or hours to reach an accuracy."""
    until_text = f"until the accuracy on all classes reaches {accuracy:g} % in the last task"
    unreached_note = "empty unless all seeds reach it at an evaluation"
    if unit == "rounds":
        meaning = f"rounds of the run {until_text}; {unreached_note}"
        to_accuracy, show = partial(rounds_to, accuracy=accuracy), no_decimals
    elif unit == "hours":
        meaning = f"hours of the virtual clock {until_text}; {unreached_note}"
        to_accuracy, show = partial(hours_to, accuracy=accuracy), thousandths
    else:
        meaning = f"MB sent in the run {until_text}; {unreached_note}"
        to_accuracy, show = partial(megabytes_to, accuracy=accuracy), thousandths
    unit = "MB" if unit == "mb" else unit
    return Column(f"{unit} to {accuracy:g} %", meaning, to_accuracy, show, of_all_seeds=True)


def _results_of(experiment: Experiment, method: str) -> dict[int, Result]:
    """Return the results of a method by seed; empty if it has no row or several."""
    lines = [line for line in experiment.lines if line.results[0].method == method]
    return dict(zip(lines[0].seeds, lines[0].results, strict=True)) if len(lines) == 1 else {}


def entry_of(
    line: Line, column: Column, reference: Mapping[int, Result] | None = None
) -> SeedValues | None:
    """Return the entry of a row in a column; None if no run has a value.

    Args:
        line: Row of a table.
        column: Column of the entry.
        reference: Results of the column's reference method by seed, for relative metrics.
    """
    by_seed = {}
    for seed, result in zip(line.seeds, line.results, strict=True):
        value = column.value(result)
        if column.against and reference and seed in reference:
            value = column.against(result, reference[seed])
        if value is not None and not math.isnan(value):
            by_seed[seed] = float(value)
    if column.of_all_seeds and len(by_seed) < len(line.results):
        return None
    return SeedValues(by_seed) if by_seed else None


def mark_entries(entries: Sequence[SeedValues | None], column: Column) -> list[SeedValues | None]:
    """Mark the best and second entries, and whether others differ significantly from the best.

    Equal means share a rank, and the next ranks are left out: two best methods leave no second.
    Means are equal if they agree to ``DIGITS`` decimals.

    Args:
        entries: Entries of a column; None: not recorded or not ranked.
        column: The column; costs are not ranked and get no marks.
    """
    measurements = [e for e in entries if e is not None]
    if not column.better or len(measurements) < 2:
        return list(entries)
    means = sorted((round(e.mean, DIGITS) for e in measurements), reverse=column.better == "high")
    best = [e for e in measurements if round(e.mean, DIGITS) == means[0]]
    many_seeds = any(len(e.by_seed) > 1 for e in measurements)
    marks: dict[int, Mark] = {0: "best", 1: "second"}
    marked_entries: list[SeedValues | None] = []
    for entry in entries:
        if entry is None:
            marked_entries.append(None)
            continue
        rank = means.index(round(entry.mean, DIGITS))
        tests = (differ_significantly(top, entry) for top in best) if rank > 0 else iter(())
        differs = next((result for result in tests if result is not None), None)
        lacks_test = rank > 0 and many_seeds and differs is None
        marked_entries.append(SeedValues(entry.by_seed, marks.get(rank, ""), differs, lacks_test))
    return marked_entries
