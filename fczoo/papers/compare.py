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
from fczoo.papers.tables import Paper, PrintedNumber, choose_numbers, get_paper, plain_split
from fczoo.papers.variants import differences, open_differences, readings
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
    open: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        return self.ours.mean - self.number.value

    @property
    def matching_reading(self) -> str:
        """Return the reading that the run follows; empty if there is none."""
        return next((n for n, d in zip(self.readings, self.differences, strict=True) if not d), "")

    @property
    def from_print(self) -> tuple[str, ...]:
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
    chosen = choose_numbers(paper.numbers, tables, rows)
    parts: list[str] = []
    output_tables = {""}
    costs: dict[PrintedNumber, None] = {}
    for experiment in read_experiments(places):
        numbers_by_label = {
            line.label: matching_numbers(experiment, line, paper, chosen)
            for line in experiment.lines
        }
        comparison_rows = [
            c
            for x in experiment.lines
            for c in compare_numbers(experiment, x, paper, numbers_by_label[x.label])
        ]
        absent = not_implemented(
            paper, (n for numbers in numbers_by_label.values() for n in numbers)
        )
        if not comparison_rows and not absent:
            continue
        costs |= {n: None for numbers in numbers_by_label.values() for n in numbers}
        output_tables |= {c.number.table for c in comparison_rows} | {n.table for n in absent}
        parts += [
            describe(experiment),
            _table(comparison_rows, absent),
            *_differences(paper, comparison_rows, absent),
        ]
        parts.append(spread(experiment, paper))
        if without := [label for label, numbers in numbers_by_label.items() if not numbers]:
            among = (
                "the chosen rows" if tables or rows else f"{paper.name}'s tables of this data set"
            )
            parts.append(f"Without a row in {among}: {', '.join(without)}.")
    if not parts:
        raise FczooError(_nothing(paper, chosen, limited=bool(tables or rows)))
    if measure and (counts := count_costs(paper, [*costs], measure)):
        parts.append(f"Numbers of one client, from shapes:\n{cost_table(counts)}")
    parts += [
        f"Caveats of {f'table {t}' if t else paper.name}: {'; '.join(lines)}."
        for t, lines in paper.caveats.items()
        if t in output_tables
    ]
    return "\n\n".join(parts)


def _nothing(paper: Paper, chosen: Sequence[PrintedNumber], limited: bool) -> str:
    rows = [paper.row(n) for n in chosen]
    used = {row.dataset for row in rows}
    names = [name for name in DATASETS.names() if name in used]
    if not limited:
        return (
            f"{paper.name} has no number for the methods and data sets of these runs; its data "
            "sets: "
            f"{', '.join(names)}"
        )
    methods = sorted({row.method for row in rows if row.method})
    return (
        f"the chosen rows of {paper.name} have no number for the methods and data sets of these "
        "runs; "
        f"they are of {', '.join(methods)} on {', '.join(names)}"
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
    same = [
        n
        for n in candidates
        if paper.row(n).split in (None, split) and n.tasks == experiment.task_count
    ]
    return same or candidates


def not_implemented(paper: Paper, numbers: Iterable[PrintedNumber]) -> list[PrintedNumber]:
    """Return the distinct accuracies among some numbers that no run can follow.

    Args:
        paper: Paper that printed the numbers.
        numbers: Numbers to choose from.
    """
    return [n for n in dict.fromkeys(numbers) if paper.row(n).why and column_of(n)]


def absent_reasons(paper: Paper, numbers: Iterable[PrintedNumber]) -> list[str]:
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
        read = readings(paper, number)
        differing = tuple(tuple(differences(experiment, line, r, len(seeds))) for r in read)
        names = tuple(r.name for r in read)
        open_options = open_differences(experiment, line, read[0])
        comparison_rows.append(
            Comparison(line, number, ours, names, differing, tuple(open_options))
        )
    return comparison_rows


def column_of(number: PrintedNumber) -> Column | None:
    """Return the column to compare with a printed number; None if it is not an accuracy.

    Args:
        number: Printed number.
    """
    if number.classes is None:
        return COLUMNS[number.metric_here] if number.metric_here else None
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


def spread(experiment: Experiment, paper: Paper) -> str:
    """Describe the meaning of the paper's ± and of ours.

    Args:
        experiment: Experiment of our runs.
        paper: Paper with the printed standard deviations.
    """
    seed_sources = " and ".join(name.replace("-", " ") for name in experiment.settings["vary"])
    return (
        f"{paper.name}: {paper.spread}. Ours: ± is the sample standard deviation over seeds of "
        f"{seed_sources}."
    )


def plus_minus(mean: float, std: float | None) -> str:
    """Format a mean, with its standard deviation if there is one.

    Args:
        mean: Mean in points.
        std: Standard deviation in points; None: not given.
    """
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def _table(found: Sequence[Comparison], absent: Sequence[PrintedNumber]) -> str:
    rows = []
    for c in found:
        differing = plural(len(c.from_print), "setting differs", "settings differ")
        verdict = f"yes, with {c.matching_reading}" if c.matching_reading else f"no: {differing}"
        ours, gap = plus_minus(c.ours.mean, c.ours.std), f"{c.gap:+.1f}"
        rows.append((c.line.label, *_row_words(c.number), ours, _value(c.number), gap, verdict))
    rows += [("–", *_row_words(n), "–", _value(n), "–", "not implemented") for n in absent]
    names = ["ours", "paper's row", "metric", "our value", "paper's", "difference", "comparable"]
    return tabulate(
        rows,
        names,
        disable_numparse=True,
        colalign=("left", "left", "left", "right", "right", "right", "left"),
    )


def _row_words(n: PrintedNumber) -> tuple[str, str]:
    metric = n.metric if n.metric == n.metric_here else f"{n.metric} ({n.metric_here})"
    return f"{n.method}, {n.table} {n.dataset}, {plural(n.tasks, 'task')}, {n.partition}", metric


def _value(n: PrintedNumber) -> str:
    return plus_minus(n.value, n.std)


def _differences(
    paper: Paper, found: Sequence[Comparison], absent: Sequence[PrintedNumber]
) -> list[str]:
    """Describe differences: of all rows, then per row, then reasons for missing rows."""
    print_differences, open_differences = (
        _common(c.from_print for c in found),
        _common(c.open for c in found),
    )
    parts, row_lines = [], []
    if print_differences:
        parts.append(f"All rows differ from the print in: {', '.join(print_differences)}.")
    if open_differences:
        parts.append(f"In all rows, where the paper leaves it open: {', '.join(open_differences)}.")
    common_lines = [" ".join(parts)] if parts else []
    for label in dict.fromkeys(c.line.label for c in found):
        row_lines += _of_line(
            label,
            [c for c in found if c.line.label == label],
            {*print_differences, *open_differences},
        )
    if found and not common_lines and not row_lines:
        common_lines = ["Nothing that is printed differs."]
    row_lines += absent_reasons(paper, absent)
    return [*common_lines, *(["\n".join(row_lines)] if row_lines else [])]


def _of_line(label: str, rows: Sequence[Comparison], said: set[str]) -> list[str]:
    """Describe other differences of a row: from all its printed rows, then from single ones."""
    print_differences = [d for d in _common(c.from_print for c in rows) if d not in said]
    open_differences = [o for o in dict.fromkeys(o for c in rows for o in c.open) if o not in said]
    single: dict[tuple[str, ...], dict[str, None]] = {}
    for c in rows:
        if row_differences := tuple(
            d for d in c.from_print if d not in {*said, *print_differences}
        ):
            row = f"{c.number.method} ({c.number.table}, {c.number.partition})"
            single.setdefault(row_differences, {})[row] = None
    lines = [
        f"- against {' and '.join(names)}: {', '.join(row_differences)}."
        for row_differences, names in single.items()
    ]
    if open_differences:
        lines.append(f"- where the paper leaves it open: {', '.join(open_differences)}.")
    if print_differences:
        return [f"{label} differs from the print in: {', '.join(print_differences)}.", *lines]
    return [f"{label} differs from the print:" if single else f"{label}:", *lines] if lines else []


def _common(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the items that all lists contain, in the order of the first."""
    first, *others = [*lists] or [()]
    return [item for item in first if all(item in items for items in others)]
