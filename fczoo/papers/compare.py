"""Comparison of results with a paper's, with all settings and options that differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.metrics import seen_accuracy
from fczoo.core.options import plural
from fczoo.core.registry import DATASETS
from fczoo.federation.result import Result
from fczoo.papers.costs import Measure, cost_table, count_costs
from fczoo.papers.printed_numbers import (
    Paper,
    PrintedNumber,
    choose_numbers,
    get_paper,
    plain_split,
)
from fczoo.papers.variants import PRINT, differences, open_differences, readings
from fczoo.reports.captions import describe
from fczoo.reports.runs import Experiment, Line, read_experiments
from fczoo.reports.significance import SeedValues
from fczoo.reports.tables import COLUMNS, Column, entry_of, percent


@dataclass(frozen=True)
class Comparison:
    """Comparison of a row's result with a printed number."""

    line: Line
    number: PrintedNumber
    ours: SeedValues
    # names of the number's readings: the print, and the released code
    readings: tuple[str, ...]
    # differences of the run from each reading, such as ``rounds 2 (paper: 5)``
    differences: tuple[tuple[str, ...], ...]
    # settings that the paper does not state, if the run differs from the protocol
    open_differences: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        return self.ours.mean - self.number.value

    @property
    def matching_reading(self) -> str:
        """Return the reading that the run follows; empty if there is none."""
        return next((n for n, d in zip(self.readings, self.differences, strict=True) if not d), "")

    @property
    def print_differences(self) -> tuple[str, ...]:
        return self.differences[0]


def compare(
    places: Sequence[Path],
    key: str,
    tables: Sequence[str] = (),
    rows: Sequence[str] = (),
    measure: Measure | None = None,
) -> str:
    """Format tables of results next to a paper's numbers.

    Args:
        places: Run folders, archives, or folders that contain them.
        key: Key of the paper.
        tables: Tables to use; empty: all.
        rows: Rows to use; empty: all.
        measure: Function that returns a client's tensors; None: no costs.

    Returns:
        For each experiment its description, table, differences and spread; then costs and caveats.

    Raises:
        FczooError: The paper has no number for any run, or a name is unknown.
    """
    paper = get_paper(key)
    chosen_numbers = choose_numbers(paper.numbers, tables, rows)
    parts: list[str] = []
    output_tables = {""}
    costs: dict[PrintedNumber, None] = {}
    for experiment in read_experiments(places):
        numbers_by_label = {
            line.label: matching_numbers(experiment, line, paper, chosen_numbers)
            for line in experiment.lines
        }
        comparison_rows = [
            c
            for x in experiment.lines
            for c in compare_numbers(experiment, x, paper, numbers_by_label[x.label])
        ]
        missing_numbers = not_implemented(
            paper, (n for numbers in numbers_by_label.values() for n in numbers)
        )
        if not comparison_rows and not missing_numbers:
            continue
        costs |= {n: None for numbers in numbers_by_label.values() for n in numbers}
        output_tables |= {c.number.table for c in comparison_rows} | {
            n.table for n in missing_numbers
        }
        parts += [
            describe(experiment),
            _table(comparison_rows, missing_numbers),
            *_differences(paper, comparison_rows, missing_numbers),
        ]
        parts.append(describe_deviations(experiment, paper))
        if other_labels := [label for label, numbers in numbers_by_label.items() if not numbers]:
            scope = (
                "the chosen rows" if tables or rows else f"{paper.name}'s tables of this data set"
            )
            parts.append(f"Not in {scope}: {', '.join(other_labels)}.")
    if not parts:
        raise FczooError(_no_number_message(paper, chosen_numbers, limited=bool(tables or rows)))
    if measure and (counts := count_costs(paper, [*costs], measure)):
        parts.append(
            f"Printed costs and our counts, which follow from tensor shapes:\n{cost_table(counts)}"
        )
    parts += [
        f"Caveats of {f'table {t}' if t else paper.name}: {'; '.join(lines)}."
        for t, lines in paper.caveats.items()
        if t in output_tables
    ]
    return "\n\n".join(parts)


def _no_number_message(paper: Paper, chosen_numbers: Sequence[PrintedNumber], limited: bool) -> str:
    rows = [paper.row(n) for n in chosen_numbers]
    datasets = {row.dataset for row in rows}
    names = [name for name in DATASETS.names() if name in datasets]
    if not limited:
        return (
            f"{paper.name} has no number for the methods and data sets of these runs; its data "
            f"sets: {', '.join(names)}"
        )
    methods = sorted({row.method for row in rows if row.method})
    return (
        f"the chosen rows of {paper.name} have no number for the methods and data sets of these "
        f"runs; they cover {', '.join(methods)} on {', '.join(names)}"
    )


def matching_numbers(
    experiment: Experiment, line: Line, paper: Paper, numbers: Sequence[PrintedNumber]
) -> list[PrintedNumber]:
    """Return the numbers of a row's method and data set.

    If some of them have the row's split and number of tasks, only these are returned.

    Args:
        experiment: Experiment of the line.
        line: Row of a table.
        paper: Paper that printed the numbers.
        numbers: Numbers to choose from.
    """
    method, dataset = line.results[0].method, experiment.settings["dataset"]
    candidates = [
        n for n in numbers if (paper.row(n).method, paper.row(n).dataset) == (method, dataset)
    ]
    split = plain_split(experiment.bench_file.partition["spec"])
    same_setting = [
        n
        for n in candidates
        if paper.row(n).split in (None, split) and n.tasks == experiment.task_count
    ]
    return same_setting or candidates


def not_implemented(paper: Paper, numbers: Iterable[PrintedNumber]) -> list[PrintedNumber]:
    """Return the distinct accuracies among some numbers that no run can follow.

    Args:
        paper: Paper that printed the numbers.
        numbers: Numbers to choose from.
    """
    return [n for n in dict.fromkeys(numbers) if paper.row(n).why and column_of(n)]


def describe_missing_rows(paper: Paper, numbers: Iterable[PrintedNumber]) -> list[str]:
    """List the printed rows that no run can follow, one line per reason.

    Args:
        paper: Paper that printed the numbers.
        numbers: Numbers of the rows.
    """
    tables: dict[str, dict[str, dict[str, None]]] = {}  # reason -> row -> tables
    for n in not_implemented(paper, numbers):
        rows = tables.setdefault(paper.row(n).why, {})
        rows.setdefault(n.method, {})[n.table] = None
    lines = []
    for why, rows in tables.items():
        row_words = [f"{row} ({', '.join(row_tables)})" for row, row_tables in rows.items()]
        lines.append(f"Not implemented: {', '.join(row_words)}: {why}.")
    return lines


def comparisons(experiment: Experiment, line: Line, paper: Paper) -> list[Comparison]:
    """Compare a row with the paper's numbers for its method and data set.

    Args:
        experiment: Experiment of the row.
        line: Row of a table.
        paper: Paper to compare with.

    Returns:
        One comparison per printed number that a run can follow and whose metric the row has.
    """
    return compare_numbers(
        experiment, line, paper, matching_numbers(experiment, line, paper, paper.numbers)
    )


def compare_numbers(
    experiment: Experiment, line: Line, paper: Paper, numbers: Sequence[PrintedNumber]
) -> list[Comparison]:
    """Compare a row with printed numbers that a run can follow and whose metric the row has.

    Args:
        experiment: Experiment of the line.
        line: Row of a table.
        paper: Paper that printed the numbers.
        numbers: Numbers to compare with.

    Returns:
        One comparison per number.
    """
    comparison_rows = []
    seeds = paper.protocol.seeds.value_for(experiment.task_count)
    for number in numbers:
        column = column_of(number)
        ours = entry_of(line, column) if column else None
        if ours is None or paper.row(number).why:
            continue
        number_readings = readings(paper, number)
        reading_differences = tuple(
            tuple(differences(experiment, line, r, len(seeds))) for r in number_readings
        )
        names = tuple(r.name for r in number_readings)
        open_options = open_differences(experiment, line, number_readings[0])
        comparison_rows.append(
            Comparison(line, number, ours, names, reading_differences, tuple(open_options))
        )
    return comparison_rows


def column_of(number: PrintedNumber) -> Column | None:
    """Return the column to compare with a printed number; None if it is not an accuracy.

    Args:
        number: Printed number.
    """
    if number.classes is None:
        return COLUMNS[number.our_metric] if number.our_metric else None
    meaning = f"% of the test images of the first {number.classes} classes, once they are learned"
    return Column(
        number.metric, meaning, partial(_accuracy_at, classes=number.classes), percent, "high"
    )


def _accuracy_at(result: Result, classes: int) -> float | None:
    """Return the accuracy after this number of classes; None if no task ends there."""
    class_counts = list(accumulate(result.task_sizes))
    if classes not in class_counts:
        return None
    return seen_accuracy(result.accuracy, result.test_counts, class_counts.index(classes))


def describe_deviations(experiment: Experiment, paper: Paper) -> str:
    """Describe the meaning of the paper's ± and of ours.

    Args:
        experiment: Experiment of our runs.
        paper: Paper with the printed standard deviations.
    """
    seed_sources = " and ".join(name.replace("-", " ") for name in experiment.settings["vary"])
    return (
        f"{paper.name}: {paper.spread}. Ours: ± is the sample standard deviation over seeds, which "
        f"vary {seed_sources}."
    )


def plus_minus(mean: float, std: float | None) -> str:
    """Format a mean, with its standard deviation if there is one.

    Args:
        mean: Mean in points.
        std: Standard deviation in points; None: not given.
    """
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def _table(comparison_rows: Sequence[Comparison], missing_numbers: Sequence[PrintedNumber]) -> str:
    rows = []
    for c in comparison_rows:
        count_text = plural(len(c.print_differences), "setting differs", "settings differ")
        verdict = f"yes, with {c.matching_reading}" if c.matching_reading else f"no: {count_text}"
        ours, gap = plus_minus(c.ours.mean, c.ours.std), f"{c.gap:+.1f}"
        rows.append((c.line.label, *_row_words(c.number), ours, _value(c.number), gap, verdict))
    rows += [("–", *_row_words(n), "–", _value(n), "–", "not implemented") for n in missing_numbers]
    names = ["ours", "paper's row", "metric", "our value", "paper's", "difference", "comparable"]
    return tabulate(
        rows,
        names,
        disable_numparse=True,
        colalign=("left", "left", "left", "right", "right", "right", "left"),
    )


def _row_words(n: PrintedNumber) -> tuple[str, str]:
    metric = n.metric if n.metric == n.our_metric else f"{n.metric} ({n.our_metric})"
    return f"{n.method}, {n.table} {n.dataset}, {plural(n.tasks, 'task')}, {n.partition}", metric


def _value(n: PrintedNumber) -> str:
    return plus_minus(n.value, n.std)


def _differences(
    paper: Paper, comparison_rows: Sequence[Comparison], missing_numbers: Sequence[PrintedNumber]
) -> list[str]:
    """Describe differences: of all rows, then per row, then reasons for missing rows."""
    print_differences, open_differences = (
        _common_items(c.print_differences for c in comparison_rows),
        _common_items(c.open_differences for c in comparison_rows),
    )
    parts, row_lines = [], []
    if print_differences:
        parts.append(f"All rows differ from {PRINT} in: {', '.join(print_differences)}.")
    if open_differences:
        open_list = ", ".join(open_differences)
        parts.append(f"All rows have values that the paper does not state: {open_list}.")
    common_lines = [" ".join(parts)] if parts else []
    for label in dict.fromkeys(c.line.label for c in comparison_rows):
        row_lines += _differences_of_line(
            label,
            [c for c in comparison_rows if c.line.label == label],
            {*print_differences, *open_differences},
        )
    if comparison_rows and not common_lines and not row_lines:
        common_lines = [f"No row differs from {PRINT}."]
    row_lines += describe_missing_rows(paper, missing_numbers)
    return [*common_lines, *(["\n".join(row_lines)] if row_lines else [])]


def _differences_of_line(
    label: str, rows: Sequence[Comparison], listed_differences: set[str]
) -> list[str]:
    """Describe other differences of a row: from all its printed rows, then from single ones."""
    print_differences = [
        d for d in _common_items(c.print_differences for c in rows) if d not in listed_differences
    ]
    open_differences = [
        o
        for o in dict.fromkeys(o for c in rows for o in c.open_differences)
        if o not in listed_differences
    ]
    rows_by_differences: dict[tuple[str, ...], dict[str, None]] = {}
    for c in rows:
        if row_differences := tuple(
            d for d in c.print_differences if d not in {*listed_differences, *print_differences}
        ):
            row = f"{c.number.method} ({c.number.table}, {c.number.partition})"
            rows_by_differences.setdefault(row_differences, {})[row] = None
    lines = [
        f"- against {' and '.join(names)}: {', '.join(row_differences)}."
        for row_differences, names in rows_by_differences.items()
    ]
    if open_differences:
        lines.append(f"- values that the paper does not state: {', '.join(open_differences)}.")
    if print_differences:
        return [f"{label} differs from {PRINT} in: {', '.join(print_differences)}.", *lines]
    title = f"{label} differs from {PRINT}:" if rows_by_differences else f"{label}:"
    return [title, *lines] if lines else []


def _common_items(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the items that all lists contain, in the order of the first."""
    first, *others = [*lists] or [()]
    return [item for item in first if all(item in items for items in others)]
