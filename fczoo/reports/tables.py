"""Tables of experiments: what stands in them and which value is best."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fczoo.core.names import match
from fczoo.reports.columns import COLUMNS, Column
from fczoo.reports.runs import Experiment, Line

LEVEL = 0.05  # a difference below this p-value is significant
SAME = 1e-9  # points between values that are one
DIGITS = 9  # decimals by which means are equal
Mark = Literal["best", "second", ""]


@dataclass(frozen=True)
class Entry:
    """One figure of one method: by seed, with mean and, over several seeds, sample standard deviation."""

    by_seed: Mapping[int, float]
    mark: Mark = ""
    apart: bool | None = None  # whether the difference to the best is significant; None where none was tested
    untested: bool = False  # ranked below the best, among runs of several seeds, and not tested against it

    @property
    def like_best(self) -> bool:
        return self.apart is False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


@dataclass(frozen=True)
class Table:
    """Rows of entries; None where the runs did not record a figure."""

    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    seeds: tuple[int, ...]  # number of seeds of each row
    rows: tuple[tuple[Entry | None, ...], ...]


def make_table(experiment: Experiment, names: Sequence[str]) -> Table:
    """The named columns of an experiment, marked."""
    columns = tuple(COLUMNS[match(n, COLUMNS) or n] for n in names)
    lines = experiment.lines
    by_column = []
    for column in columns:
        entries = [entry_of(line, column) for line in lines]
        competing = [e if line.competes else None for e, line in zip(entries, lines, strict=True)]
        ranked = marked(competing, column)
        by_column.append([mark or entry for mark, entry in zip(ranked, entries, strict=True)])
    rows = tuple(zip(*by_column, strict=True))
    return Table(columns, tuple(x.label for x in lines), tuple(len(x.cells) for x in lines), rows)


def entry_of(line: Line, column: Column) -> Entry | None:
    """One figure of one line; None where no run recorded it."""
    by_seed = {}
    for seed, result in zip(line.seeds, line.results, strict=True):
        value = column.value(result)
        if value is not None and not math.isnan(value):
            by_seed[seed] = float(value)
    return Entry(by_seed) if by_seed else None


def marked(entries: Sequence[Entry | None], column: Column) -> list[Entry | None]:
    """Mark entries: best, second, not significantly different from the best, not tested against it.

    Equal means share a rank, and the ranks after it are left out: beside two best there is no second. Means
    are equal if they agree to ``DIGITS`` decimals, not as they are printed.
    """
    there = [e for e in entries if e is not None]
    if not column.better or len(there) < 2:
        return list(entries)
    ranked = sorted((round(e.mean, DIGITS) for e in there), reverse=column.better == "high")
    best = [e for e in there if round(e.mean, DIGITS) == ranked[0]]
    several = any(len(e.by_seed) > 1 for e in there)
    marks: dict[int, Mark] = {0: "best", 1: "second"}
    out: list[Entry | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        rank = ranked.index(round(entry.mean, DIGITS))
        tests = (significant(other, entry) for other in best) if rank > 0 else iter(())
        apart = next((result for result in tests if result is not None), None)
        untested = rank > 0 and several and apart is None
        out.append(Entry(entry.by_seed, marks.get(rank, ""), apart, untested))
    return out


def significant(a: Entry, b: Entry) -> bool | None:
    """Whether two entries differ by a two-sided paired t test over the seeds that both have.

    None where nothing is tested: see ``p_value``.
    """
    p = p_value(a, b)
    return None if p is None else p < LEVEL


def p_value(a: Entry, b: Entry) -> float | None:
    """Of a two-sided paired t test over the seeds that both have.

    None, since nothing is sampled, with fewer than two such seeds, and where the difference is the same with
    each seed, as of two methods that draw nothing.
    """
    seeds = sorted(set(a.by_seed) & set(b.by_seed))
    if not sampled([a.by_seed[s] - b.by_seed[s] for s in seeds]):
        return None
    from scipy.stats import ttest_rel  # takes a second

    return float(ttest_rel([a.by_seed[s] for s in seeds], [b.by_seed[s] for s in seeds]).pvalue)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean by Student's t; None for a single value, or one that all seeds have."""
    if not sampled(values):
        return None
    from scipy.stats import t as student  # takes a second

    spread = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student.ppf(1 - LEVEL / 2, len(values) - 1)) * spread
    mean = statistics.fmean(values)
    return mean - half, mean + half


def sampled(values: Sequence[float]) -> bool:
    """Whether there are several values, and seeds move them: else they say nothing of chance."""
    return len(values) > 1 and max(values) - min(values) >= SAME
