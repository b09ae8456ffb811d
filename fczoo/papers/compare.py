"""Our numbers beside a paper's, with every setting and option in which a run differs from the print."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.metrics import seen_accuracy
from fczoo.core.registry import DATASETS
from fczoo.federation.result import Result
from fczoo.papers.printed import Number, Paper, get_paper, plain_split
from fczoo.papers.readings import differences, left_open, readable
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
    why: str = ""  # why no run can be what was printed

    @property
    def gap(self) -> float:
        return self.ours.mean - self.number.value

    @property
    def followed(self) -> str:
        """The reading that the run follows in all that is said; empty for none."""
        return next((n for n, d in zip(self.readings, self.differences, strict=True) if not d), "")

    @property
    def from_print(self) -> tuple[str, ...]:
        return self.differences[0] if self.differences else (self.why,)


def compare(places: Sequence[Path], key: str) -> str:
    """Tables of ours and theirs. Raises FczooError where the paper has no number for any of the runs."""
    paper = get_paper(key)
    parts, tables = [], {""}
    for experiment in read_experiments(places):
        found = [c for line in experiment.lines for c in comparisons(experiment, line, paper)]
        if found:
            tables |= {c.number.table for c in found}
            parts += [describe(experiment), _table(found), _differences(found), spread(experiment, paper)]
            without = [line.label for line in experiment.lines if not any(c.line is line for c in found)]
            parts += (
                [f"Without a row in {paper.name}'s tables of this data set: {', '.join(without)}."]
                if without
                else []
            )
    if not parts:
        rows = {paper.row(n).dataset for n in paper.numbers}
        raise FczooError(
            f"{paper.name} has no number for the methods and data sets of these runs; its data sets: "
            f"{', '.join(name for name in DATASETS.names() if name in rows)}"
        )
    parts += [
        f"To know about {f'table {t}' if t else paper.name}: {'; '.join(lines)}."
        for t, lines in paper.caveats.items()
        if t in tables
    ]
    return "\n\n".join(parts)


def comparisons(experiment: Experiment, line: Line, paper: Paper) -> list[Comparison]:
    """The paper's numbers for a line's method and data set.

    Those of the same split and number of tasks, if it has any; else all.
    """
    method, dataset = line.results[0].method, experiment.settings["dataset"]
    numbers = [n for n in paper.numbers if (paper.row(n).method, paper.row(n).dataset) == (method, dataset)]
    split = plain_split(experiment.about.partition["spec"])
    same = [n for n in numbers if paper.row(n).split in (None, split) and n.tasks == experiment.task_count]
    return beside(experiment, line, paper, same or numbers)


def beside(experiment: Experiment, line: Line, paper: Paper, numbers: Sequence[Number]) -> list[Comparison]:
    """A line beside those of the numbers that its runs have a figure for."""
    found = []
    seeds = paper.protocol.seeds.given(experiment.task_count)
    for number in numbers:
        column = column_of(number)
        ours = entry_of(line, column) if column else None
        if ours is None:
            continue
        read = readable(paper, number)
        differing = tuple(tuple(differences(experiment, line, r, len(seeds))) for r in read)
        names, left = tuple(r.name for r in read), left_open(experiment, line, read[0]) if read else ()
        why = paper.row(number).why or "its protocol has no such split"
        found.append(Comparison(line, number, ours, names, differing, tuple(left), why))
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


def _table(found: Sequence[Comparison]) -> str:
    rows = []
    for c in found:
        n = c.number
        printed = f"{n.method}, {n.table} {n.dataset}, {n.tasks} tasks, {n.partition}"
        verdict = f"yes, with {c.followed}" if c.followed else f"no: {len(c.from_print)} settings differ"
        metric = n.metric if n.metric == n.metric_here else f"{n.metric} ({n.metric_here})"
        rows.append(
            (
                c.line.label,
                printed,
                metric,
                plus_minus(c.ours.mean, c.ours.std),
                plus_minus(n.value, n.std),
                f"{c.gap:+.1f}",
                verdict,
            )
        )
    names = ["ours", "paper's row", "metric", "our value", "paper's", "difference", "comparable"]
    return tabulate(
        rows,
        names,
        disable_numparse=True,
        colalign=("left", "left", "left", "right", "right", "right", "left"),
    )


def _differences(found: Sequence[Comparison]) -> str:
    """What differs from the print, once for all rows of one line that differ in the same; what is open."""
    shared = [d for d in found[0].from_print if all(d in c.from_print for c in found)]
    lines = [f"All rows differ from the print in: {', '.join(shared)}."] if shared else []
    seen: dict[tuple[str, ...], None] = {}
    for c in found:
        own = [d for d in c.from_print if d not in shared]
        key = (c.line.label, f"{c.number.method}, {c.number.table} {c.number.partition}", ", ".join(own))
        if own and key not in seen:
            seen[key] = None
            lines.append(f"{key[0]} against {key[1]} differs from the print in: {key[2]}.")
        if c.open and (c.line.label, *c.open) not in seen:
            seen[c.line.label, *c.open] = None
            lines.append(f"{c.line.label}, where the paper leaves it open: {', '.join(c.open)}.")
    return "\n".join(lines) or "Nothing that is printed differs."
