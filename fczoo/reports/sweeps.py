"""Tables and figures of sweeps: accuracy over the values of options and settings."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, to_csv_text
from fczoo.core.options import flag
from fczoo.reports.captions import describe
from fczoo.reports.figure_data import Curves
from fczoo.reports.paper_style_tables import display_name
from fczoo.reports.runs import Experiment, Line, effective_settings
from fczoo.reports.table_formats import legend, number, to_json, to_latex, to_markdown, to_text
from fczoo.reports.tables import Table, column_of, entry_of, mark_entries, percent
from fczoo.reports.text_format import columns as terminal_width
from fczoo.reports.text_format import option_word, short_name

METRICS = ("A_N", "Avg", "FAA", "forgetting")
NOTE = (
    "These are accuracies on test images. To choose values for a comparison, use fczoo tune, which "
    "does not use test images."
)


@dataclass(frozen=True)
class SweepPoint:
    """Point of a sweep: runs of one method with one value per axis."""

    values: tuple[Any, ...]
    experiment: Experiment
    line: Line


@dataclass(frozen=True)
class OptionSweep:
    """Sweep of one method: runs that differ only in options or settings."""

    method: str
    axes: tuple[str, ...]  # METHOD.OPTION, or the name of a setting
    points: tuple[SweepPoint, ...]  # sorted by value

    @property
    def title(self) -> str:
        """Return the method's name as in its paper."""
        return display_name(self.method)

    @property
    def place(self) -> tuple[str, ...]:
        """Return the data set and, if all points have the same, the partition."""
        partitions = {_partition(point.experiment): None for point in self.points}
        partition = partitions if len(partitions) == 1 else ()
        return (_dataset(self.points[0].experiment), *partition)

    @property
    def heading(self) -> str:
        """Describe the method, the axes and the settings that all runs share."""
        experiments = {id(point.experiment): point.experiment for point in self.points}
        first, *others = experiments.values()
        common = ", ".join(self.place) if others else describe(first)
        return f"{self.title} over {', '.join(self.axes)}\n{common}"


def find_sweeps(experiments: Iterable[Experiment]) -> list[OptionSweep]:
    """Find the sweeps: methods that were run with several values of an option or setting.

    Each data set has its own sweeps. So does each partition, unless nothing else differs.

    Args:
        experiments: Experiments of any folders.

    Raises:
        FczooError: No method was run with several values.
    """
    groups: dict[tuple[str, str], dict[str, list[tuple[Experiment, Line]]]] = {}
    for experiment in experiments:
        for line in experiment.lines:
            by_partition = groups.setdefault((_dataset(experiment), line.results[0].method), {})
            by_partition.setdefault(_partition(experiment), []).append((experiment, line))
    sweeps = []
    for (_, method), by_partition in groups.items():
        varied_lines = [lines for lines in by_partition.values() if len(lines) > 1]
        if varied_lines:
            sweeps += [_sweep(method, lines) for lines in varied_lines]
        elif len(by_partition) > 1:  # only the partition differs
            sweeps.append(_sweep(method, [lines[0] for lines in by_partition.values()]))
    if not sweeps:
        raise FczooError(
            "no method has runs with several values of an option or setting; "
            "run them with fczoo bench --sweep"
        )
    return sweeps


def _dataset(experiment: Experiment) -> str:
    return str(experiment.settings["dataset"])


def _partition(experiment: Experiment) -> str:
    return str(experiment.bench_file.partition["spec"])


def _sweep(method: str, lines: Sequence[tuple[Experiment, Line]]) -> OptionSweep:
    """Create the sweep of a method's lines; values that differ become axes."""
    values_of_lines = [_values(method, experiment, line) for experiment, line in lines]
    names = dict.fromkeys(name for values in values_of_lines for name in values)
    axes = [name for name in names if len({encode_json(v.get(name)) for v in values_of_lines}) > 1]
    ranks = {
        name: {
            encode_json(value): rank
            for rank, value in enumerate(
                _sort_values(values.get(name) for values in values_of_lines)
            )
        }
        for name in axes
    }
    points = [
        SweepPoint(tuple(values.get(name) for name in axes), experiment, line)
        for values, (experiment, line) in zip(values_of_lines, lines, strict=True)
    ]

    def rank(point: SweepPoint) -> list[int]:
        return [
            ranks[name][encode_json(value)] for name, value in zip(axes, point.values, strict=True)
        ]

    return OptionSweep(method, tuple(axes), tuple(sorted(points, key=rank)))


def _values(method: str, experiment: Experiment, line: Line) -> dict[str, Any]:
    """Return the settings and options of a line, which are possible axes."""
    settings = {**experiment.settings, "partition": _partition(experiment)}
    options = line.results[0].options
    return {
        **effective_settings(settings),
        **{f"{method}.{name}": value for name, value in options.items()},
    }


def _sort_values(values: Iterable[Any]) -> list[Any]:
    """Return distinct values: sorted numbers first, then others in order of appearance."""
    distinct_values = list({encode_json(value): value for value in values}.values())
    numbers = [v for v in distinct_values if isinstance(v, int | float) and not isinstance(v, bool)]
    return [*sorted(numbers), *(value for value in distinct_values if value not in numbers)]


def sweep_table(sweep: OptionSweep, names: Sequence[str] = METRICS) -> Table:
    """Create a table with one row per point and marks of the best values.

    Args:
        sweep: Sweep of a method.
        names: Names of the columns.

    Raises:
        FczooError: A name is unknown.
    """
    columns = tuple(column_of(name) for name in dict.fromkeys(names))
    lines = [point.line for point in sweep.points]
    by_column = [mark_entries([entry_of(x, column) for x in lines], column) for column in columns]
    labels = [", ".join(map(option_word, point.values)) for point in sweep.points]
    counts = [len(line.records) for line in lines]
    return Table(columns, tuple(labels), tuple(counts), tuple(zip(*by_column, strict=True)))


def best_points(sweep: OptionSweep, table: Table) -> list[SweepPoint]:
    """Return the points with the best value in the table's first column; several if equal.

    Args:
        sweep: Sweep of the table.
        table: Table of ``sweep_table``.
    """
    return [
        point
        for point, row in zip(sweep.points, table.rows, strict=True)
        if row[0] is not None and row[0].mark == "best"
    ]


def option_words(sweep: OptionSweep, point: SweepPoint) -> str:
    """Return the options of ``fczoo bench`` that run one point.

    Args:
        sweep: Sweep of the point.
        point: The point.
    """
    return " ".join(
        f"--set {name}={option_word(value)}"
        if "." in name
        else f"{flag(name)} {option_word(value)}"
        for name, value in zip(sweep.axes, point.values, strict=True)
    )


def sweep_report(sweeps: Sequence[OptionSweep], style: str, names: Sequence[str] = ()) -> str:
    """Format the tables of sweeps, each with the options of its best row.

    Args:
        sweeps: Sweeps in the order of the text.
        style: ``text``, ``markdown``, ``latex``, ``csv`` or ``json``.
        names: Names of the columns; the first one determines the best row. Default: ``METRICS``.

    Raises:
        FczooError: A name is unknown.
    """
    tables = [sweep_table(sweep, names or METRICS) for sweep in sweeps]
    if style == "json":
        return encode_json([*map(_as_json, sweeps, tables)], indent=1)
    if style == "csv":
        return _to_csv(sweeps, tables)
    parts = []
    for sweep, table in zip(sweeps, tables, strict=True):
        head = ", ".join(name.removeprefix(f"{sweep.method}.") for name in sweep.axes)
        if style == "latex":
            parts.append(to_latex(table, sweep.heading.replace("\n", ". "), head))
        else:
            write = partial(to_text if style == "text" else to_markdown, head=head)
            parts += [sweep.heading, write(table)]
        if best := best_points(sweep, table):
            entry = next(r[0] for r in table.rows if r[0] is not None and r[0].mark == "best")
            value = number(entry, table.columns[0])
            options = " or ".join(option_words(sweep, point) for point in best)
            line = f"best {table.columns[0].name}: {value}, with {options}"
            parts.append(f"% {line}" if style == "latex" else line)
    width = min(terminal_width() or 120, 120)
    ending = f"{legend(tables, style)}\n{textwrap.fill(NOTE, width)}"
    return "\n\n".join([*parts, textwrap.indent(ending, "% ") if style == "latex" else ending])


def _as_json(sweep: OptionSweep, table: Table) -> dict[str, Any]:
    best = best_points(sweep, table)
    rows = [
        {
            "values": dict(zip(sweep.axes, point.values, strict=True)),
            "best": point in best,
            "seeds": row["seeds"],
            "metrics": row["values"],
        }
        for point, row in zip(sweep.points, to_json(table), strict=True)
    ]
    dataset, *partition = sweep.place
    names = {"method": sweep.method, "dataset": dataset, "partition": "".join(partition)}
    return {**names, "axes": sweep.axes, "rows": rows}


def _to_csv(sweeps: Sequence[OptionSweep], tables: Sequence[Table]) -> str:
    """Format one row per point with unrounded means and standard deviations."""
    names = [f"{c.name}{end}" for c in tables[0].columns for end in ("", " std")]
    rows: list[list[object]] = [
        ["dataset", "partition", "method", "options", *names, "seeds", "best"]
    ]
    for sweep, table in zip(sweeps, tables, strict=True):
        best = best_points(sweep, table)
        for point, row, seeds in zip(sweep.points, table.rows, table.seeds, strict=True):
            numbers = [
                "" if value is None else value
                for entry in row
                for value in ((None, None) if entry is None else (entry.mean, entry.std))
            ]
            values = zip(sweep.axes, point.values, strict=True)
            options = "; ".join(f"{name}={option_word(value)}" for name, value in values)
            mark = int(point in best)
            location = _dataset(point.experiment), _partition(point.experiment)
            rows.append([*location, sweep.method, options, *numbers, seeds, mark])
    return to_csv_text(rows)


def sweep_figures(sweeps: Sequence[OptionSweep], name: str = METRICS[0]) -> list[Curves]:
    """Plot the sweeps; sweeps with the same data and axes share one figure.

    Args:
        sweeps: Sweeps to draw.
        name: Name of the metric.

    Raises:
        FczooError: The name is unknown.
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[OptionSweep]] = {}
    for sweep in sweeps:
        groups.setdefault((sweep.place, sweep.axes), []).append(sweep)
    places = dict.fromkeys(place for place, _ in groups)
    return [
        _figure(group, name, ", ".join(place) if len(places) > 1 else "")
        for (place, _), group in groups.items()
    ]


def _figure(sweeps: Sequence[OptionSweep], metric: str, place: str) -> Curves:
    """Plot sweeps with the same data and axes."""
    column, axes = column_of(metric), sweeps[0].axes
    points = [(sweep, point) for sweep in sweeps for point in sweep.points]
    x = _x_axis(sweeps)
    ticks = [option_word(v) for v in _sort_values(point.values[x] for _, point in points)]
    curves: dict[str, list[tuple[int, Mapping[int, float]]]] = {}
    is_line = all(_is_function(sweep, x) for sweep in sweeps)
    for sweep, point in points:
        others = [
            f"{short_name(axis)}={option_word(value)}"
            for i, (axis, value) in enumerate(zip(axes, point.values, strict=True))
            if i != x and not is_line
        ]
        label = f"{sweep.title} ({', '.join(others)})" if others else sweep.title
        entry = entry_of(point.line, column)
        position = ticks.index(option_word(point.values[x])) + 1
        if entry is not None:
            curves.setdefault(label, []).append((position, entry.by_seed))
    labels = list(map(short_name, axes))
    others = [axis for i, axis in enumerate(labels) if i != x]
    return Curves(
        name=" ".join(filter(None, ["sweep", *axes, place])),
        caption=(
            f"{column.name} over {', '.join(axes)}{f', on {place}' if place else ''}; band: "
            "standard deviation over seeds"
        ),
        x=f"{labels[x]}, with {', '.join(others)}" if is_line and others else labels[x],
        y=f"{column.name}, %" if column.show is percent else column.name,
        curves={label: _by_seed([seeds for _, seeds in curve]) for label, curve in curves.items()},
        positions={label: np.array([i for i, _ in curve]) for label, curve in curves.items()},
        ticks=ticks,
    )


def _x_axis(sweeps: Sequence[OptionSweep]) -> int:
    """Return the index of an axis that determines all others, else of the one with most values."""
    numbers = range(len(sweeps[0].axes))
    for axis in numbers:
        if all(_is_function(sweep, axis) for sweep in sweeps):
            return axis
    counts = [
        len({encode_json(p.values[axis]) for sweep in sweeps for p in sweep.points})
        for axis in numbers
    ]
    return counts.index(max(counts))


def _is_function(sweep: OptionSweep, axis: int) -> bool:
    """Return whether each value of an axis occurs in a single point."""
    return len({encode_json(p.values[axis]) for p in sweep.points}) == len(sweep.points)


def _by_seed(points: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Return values [seeds, points] of shared seeds; without shared seeds, means [1, points].

    Args:
        points: Values by seed, for each point.
    """
    seeds = sorted(set.intersection(*(set(point) for point in points)))
    if not seeds:
        return np.array([[np.mean([*point.values()]) for point in points]])
    return np.array([[point[seed] for point in points] for seed in seeds])
