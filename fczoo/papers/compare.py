"""Our numbers beside a paper's, with every setting and option in which a run differs from the print."""

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
from fczoo.papers.printed import Number, Paper, choose_numbers, get_paper, plain_split
from fczoo.papers.readings import differences, left_open, readings
from fczoo.reports.columns import COLUMNS, Column, percent
from fczoo.reports.describe import describe
from fczoo.reports.runs import Experiment, Line, read_experiments
from fczoo.reports.tables import Entry, entry_of


@dataclass(frozen=True)
class Comparison:
    """One figure of one line beside one printed number."""

    line: Line
    number: Number
    ours: Entry
    readings: tuple[str, ...]  # names of the readings of the number: the print, and the released code
    differences: tuple[tuple[str, ...], ...]  # of each, in what the run differs: ``rounds 2 (paper: 5)``
    open: tuple[str, ...] = ()  # what the paper does not say, where the run has other than the protocol

    @property
    def gap(self) -> float:
        return self.ours.mean - self.number.value

    @property
    def followed(self) -> str:
        """The reading that the run follows in all that is said; empty for none."""
        return next((n for n, d in zip(self.readings, self.differences, strict=True) if not d), "")

    @property
    def from_print(self) -> tuple[str, ...]:
        return self.differences[0]


def compare(places: Sequence[Path], key: str, tables: Sequence[str] = (), rows: Sequence[str] = ()) -> str:
    """Write tables of our numbers beside a paper's, of the named tables and rows only if any are named.

    Raises FczooError where the paper has no number for any of the runs, and for unknown names.
    """
    paper = get_paper(key)
    chosen = choose_numbers(paper.numbers, tables, rows)
    parts: list[str] = []
    shown = {""}
    for experiment in read_experiments(places):
        wanted = {line.label: matching(experiment, line, paper, chosen) for line in experiment.lines}
        found = [c for x in experiment.lines for c in beside(experiment, x, paper, wanted[x.label])]
        absent = not_implemented(paper, (n for numbers in wanted.values() for n in numbers))
        if not found and not absent:
            continue
        shown |= {c.number.table for c in found} | {n.table for n in absent}
        parts += [describe(experiment), _table(found, absent), *_differences(paper, found, absent)]
        parts.append(spread(experiment, paper))
        if without := [label for label, numbers in wanted.items() if not numbers]:
            among = "the chosen rows" if tables or rows else f"{paper.name}'s tables of this data set"
            parts.append(f"Without a row in {among}: {', '.join(without)}.")
    if not parts:
        raise FczooError(_nothing(paper, chosen, limited=bool(tables or rows)))
    parts += [
        f"To know about {f'table {t}' if t else paper.name}: {'; '.join(lines)}."
        for t, lines in paper.caveats.items()
        if t in shown
    ]
    return "\n\n".join(parts)


def _nothing(paper: Paper, chosen: Sequence[Number], limited: bool) -> str:
    rows = [paper.row(n) for n in chosen]
    used = {row.dataset for row in rows}
    names = [name for name in DATASETS.names() if name in used]
    if not limited:
        return (
            f"{paper.name} has no number for the methods and data sets of these runs; its data sets: "
            f"{', '.join(names)}"
        )
    methods = sorted({row.method for row in rows if row.method})
    return (
        f"the chosen rows of {paper.name} have no number for the methods and data sets of these runs; "
        f"they are of {', '.join(methods)} on {', '.join(names)}"
    )


def matching(experiment: Experiment, line: Line, paper: Paper, numbers: Sequence[Number]) -> list[Number]:
    """Return the numbers of a line's method and data set.

    Those of the same split and number of tasks, if there are any; else all.
    """
    method, dataset = line.results[0].method, experiment.settings["dataset"]
    found = [n for n in numbers if (paper.row(n).method, paper.row(n).dataset) == (method, dataset)]
    split = plain_split(experiment.about.partition["spec"])
    same = [n for n in found if paper.row(n).split in (None, split) and n.tasks == experiment.task_count]
    return same or found


def not_implemented(paper: Paper, numbers: Iterable[Number]) -> list[Number]:
    """Return the accuracies among some numbers that no run can follow, each once."""
    return [n for n in dict.fromkeys(numbers) if paper.row(n).why and column_of(n)]


def absent_reasons(paper: Paper, numbers: Iterable[Number]) -> list[str]:
    """Name the rows among some numbers that no run can follow, with one line for each reason."""
    tables: dict[str, dict[str, dict[str, None]]] = {}  # reason -> row -> tables
    for n in not_implemented(paper, numbers):
        rows = tables.setdefault(paper.row(n).why, {})
        rows.setdefault(n.method, {})[n.table] = None
    lines = []
    for why, rows in tables.items():
        named = [f"{row} ({', '.join(held)})" for row, held in rows.items()]
        lines.append(f"Not implemented: {', '.join(named)}: {why}.")
    return lines


def comparisons(experiment: Experiment, line: Line, paper: Paper) -> list[Comparison]:
    """Compare a line with the paper's numbers for its method and data set."""
    return beside(experiment, line, paper, matching(experiment, line, paper, paper.numbers))


def beside(experiment: Experiment, line: Line, paper: Paper, numbers: Sequence[Number]) -> list[Comparison]:
    """Compare a line with those of the numbers that its runs have a figure for and can follow."""
    found = []
    seeds = paper.protocol.seeds.given(experiment.task_count)
    for number in numbers:
        column = column_of(number)
        ours = entry_of(line, column) if column else None
        if ours is None or paper.row(number).why:
            continue
        read = readings(paper, number)
        differing = tuple(tuple(differences(experiment, line, r, len(seeds))) for r in read)
        names, left = tuple(r.name for r in read), left_open(experiment, line, read[0])
        found.append(Comparison(line, number, ours, names, differing, tuple(left)))
    return found


def column_of(number: Number) -> Column | None:
    """The figure of a run that a printed number is to be compared with; None for what is no accuracy."""
    if number.classes is None:
        return COLUMNS[number.metric_here] if number.metric_here else None
    meaning = f"% of the test images of the first {number.classes} classes, once they are learned"
    return Column(number.metric, meaning, partial(_accuracy_at, classes=number.classes), percent, "high")


def _accuracy_at(result: Result, classes: int) -> float | None:
    """Accuracy over all classes seen when there were so many; None where no task ends there."""
    seen = list(accumulate(result.task_sizes))
    if classes not in seen:
        return None
    return seen_accuracy(result.accuracy, result.test_counts, seen.index(classes))


def spread(experiment: Experiment, paper: Paper) -> str:
    """What the paper's ± is a spread of, and what ours is."""
    moved = " and ".join(word.replace("-", " ") for word in experiment.settings["vary"])
    return f"{paper.name}: {paper.spread}. Ours: ± is the sample standard deviation over seeds of {moved}."


def plus_minus(mean: float, std: float | None) -> str:
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def _table(found: Sequence[Comparison], absent: Sequence[Number]) -> str:
    rows = []
    for c in found:
        differing = plural(len(c.from_print), "setting differs", "settings differ")
        verdict = f"yes, with {c.followed}" if c.followed else f"no: {differing}"
        ours, gap = plus_minus(c.ours.mean, c.ours.std), f"{c.gap:+.1f}"
        rows.append((c.line.label, *_printed(c.number), ours, _value(c.number), gap, verdict))
    rows += [("–", *_printed(n), "–", _value(n), "–", "not implemented") for n in absent]
    names = ["ours", "paper's row", "metric", "our value", "paper's", "difference", "comparable"]
    return tabulate(
        rows,
        names,
        disable_numparse=True,
        colalign=("left", "left", "left", "right", "right", "right", "left"),
    )


def _printed(n: Number) -> tuple[str, str]:
    metric = n.metric if n.metric == n.metric_here else f"{n.metric} ({n.metric_here})"
    return f"{n.method}, {n.table} {n.dataset}, {plural(n.tasks, 'task')}, {n.partition}", metric


def _value(n: Number) -> str:
    return plus_minus(n.value, n.std)


def _differences(paper: Paper, found: Sequence[Comparison], absent: Sequence[Number]) -> list[str]:
    """Say what all rows share, then what each row has beside that, then why rows are not implemented."""
    printed, left = _common(c.from_print for c in found), _common(c.open for c in found)
    parts, own = [], []
    if printed:
        parts.append(f"All rows differ from the print in: {', '.join(printed)}.")
    if left:
        parts.append(f"In all rows, where the paper leaves it open: {', '.join(left)}.")
    shared = [" ".join(parts)] if parts else []
    for label in dict.fromkeys(c.line.label for c in found):
        own += _of_line(label, [c for c in found if c.line.label == label], {*printed, *left})
    if found and not shared and not own:
        shared = ["Nothing that is printed differs."]
    own += absent_reasons(paper, absent)
    return [*shared, *(["\n".join(own)] if own else [])]


def _of_line(label: str, rows: Sequence[Comparison], said: set[str]) -> list[str]:
    """Say in what one line differs beside what was ``said``: from all its rows, then from single rows."""
    printed = [d for d in _common(c.from_print for c in rows) if d not in said]
    left = [o for o in dict.fromkeys(o for c in rows for o in c.open) if o not in said]
    single: dict[tuple[str, ...], dict[str, None]] = {}
    for c in rows:
        if more := tuple(d for d in c.from_print if d not in {*said, *printed}):
            row = f"{c.number.method} ({c.number.table}, {c.number.partition})"
            single.setdefault(more, {})[row] = None
    lines = [f"- against {' and '.join(names)}: {', '.join(more)}." for more, names in single.items()]
    if left:
        lines.append(f"- where the paper leaves it open: {', '.join(left)}.")
    if printed:
        return [f"{label} differs from the print in: {', '.join(printed)}.", *lines]
    return [f"{label} differs from the print:" if single else f"{label}:", *lines] if lines else []


def _common(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return what all lists hold, in the order of the first."""
    first, *others = [*lists] or [()]
    return [item for item in first if all(item in other for other in others)]
