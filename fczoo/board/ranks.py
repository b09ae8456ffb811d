"""Ranks of methods over seeds and benchmarks, tests of their differences, and their diagram."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Any

from scipy.stats import friedmanchisquare, rankdata, studentized_range

from fczoo.board.charts import as_csv
from fczoo.reports.drawing import COLOURS, STYLE, import_matplotlib, picture_class
from fczoo.reports.runs import Line
from fczoo.reports.significance import LEVEL, SeedValues, p_value
from fczoo.reports.tables import COLUMNS, entry_of

MIN_BLOCKS = 5  # smallest number of seeds or benchmarks for a critical difference
MIN_METHODS = 3  # smallest number of methods for a critical difference
ROW_HEIGHT = 0.19  # inches per method in the diagram of critical differences


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two entries."""

    difference: float  # of their means over the shared seeds
    seeds: int  # number of shared seeds
    p: float  # of a two-sided paired t test over the shared seeds
    corrected_p: float  # p with Holm's correction for all pairs that are tested together


def pairs(entries: Sequence[SeedValues]) -> dict[tuple[int, int], PairedComparison]:
    """Test all pairs (i, j), i < j, and correct the p values for their number.

    Args:
        entries: Entries of one column, one per method.

    Returns:
        Results by pair; pairs that cannot be tested are left out, see ``p_value``.
    """
    p_values = {}
    for i, j in combinations(range(len(entries)), 2):
        p = p_value(entries[i], entries[j])
        if p is not None:
            p_values[i, j] = p
    corrected_p = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    results = {}
    for (i, j), p in p_values.items():
        a, b = entries[i].by_seed, entries[j].by_seed
        common_seeds = [seed for seed in a if seed in b]
        difference = statistics.fmean(a[seed] - b[seed] for seed in common_seeds)
        results[i, j] = PairedComparison(difference, len(common_seeds), p, corrected_p[i, j])
    return results


def holm(p: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction, which controls the family-wise error rate.

    Args:
        p: p values of tests that belong together.

    Returns:
        Corrected p values in the same order, at most 1.
    """
    out, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        out[index] = largest
    return out


@dataclass(frozen=True)
class CriticalDifference:
    """Mean ranks over blocks, 1 the best, and Nemenyi's critical difference."""

    ranks: Mapping[str, float]  # best first
    distance: float  # critical difference at 5 %: smaller differences are not significant
    p: float  # p value of Friedman's test
    blocks: int  # number of blocks


def critical(
    blocks: Sequence[Mapping[str, float]], least: int = MIN_BLOCKS
) -> CriticalDifference | None:
    """Compute mean ranks and critical difference over the blocks and methods of ``choose_blocks``.

    Args:
        blocks: Values by method, one mapping per seed or benchmark; higher is better.
        least: Smallest number of blocks.

    Returns:
        Mean ranks with the critical difference; None with too few blocks or methods.
    """
    names, having = choose_blocks(blocks)
    if not _enough(blocks, names, least):
        return None
    ranks = [rankdata([-block[name] for name in names]) for block in having]
    means = {name: statistics.fmean(row[i] for row in ranks) for i, name in enumerate(names)}
    p = float(friedmanchisquare(*([block[name] for block in having] for name in names)).pvalue)
    k = len(names)
    q = float(studentized_range.ppf(1 - LEVEL, k, 1e6)) / math.sqrt(2)
    distance = q * math.sqrt(k * (k + 1) / (6 * len(having)))
    mean_ranks = dict(sorted(means.items(), key=lambda item: item[1]))
    return CriticalDifference(mean_ranks, distance, 1.0 if math.isnan(p) else p, len(having))


def draw_critical(critical: CriticalDifference) -> Any:
    """Draw mean ranks, each with a bar of Nemenyi's critical difference around it.

    Two methods whose bars overlap are not significantly different (Demšar 2006).

    Args:
        critical: Mean ranks, best first.

    Returns:
        Figure of matplotlib.

    Raises:
        FczooError: matplotlib is not installed.
    """
    with import_matplotlib().rc_context(STYLE):
        picture = picture_class()(figsize=(6.4, 0.9 + ROW_HEIGHT * len(critical.ranks)))
        axes = picture.subplots()
        places = range(len(critical.ranks))
        ranks = list(critical.ranks.values())
        half = critical.distance / 2
        axes.errorbar(
            ranks, places, xerr=half, fmt="o", color=COLOURS[0], markersize=3, linewidth=0.9
        )
        axes.axvspan(ranks[0] - half, ranks[0] + half, color=COLOURS[0], alpha=0.08)
        axes.set_yticks(places, list(critical.ranks))
        axes.set_xlim(0.5, len(ranks) + 0.5)
        axes.set_ylim(len(ranks) - 0.4, -0.6)  # the best on top
        axes.set_xlabel("mean rank by A_N, 1 the best")
        return picture


def choose_blocks(
    blocks: Sequence[Mapping[str, float]],
) -> tuple[list[str], list[Mapping[str, float]]]:
    """Choose methods that enough blocks share, and these blocks.

    Methods are added in order of their number of blocks, unless fewer than ``MIN_BLOCKS`` blocks
    (or all, if there are fewer) would share all methods. The choice does not depend on the values.

    Args:
        blocks: Values by method, one mapping per seed or benchmark.

    Returns:
        Names of the methods, and the blocks that have all of them.
    """
    enough = min(MIN_BLOCKS, len(blocks))
    block_counts = Counter(name for block in blocks for name in block)
    names: list[str] = []
    having = list(blocks)
    for name, _ in block_counts.most_common():
        remaining_blocks = [block for block in having if name in block]
        if len(remaining_blocks) >= enough:
            names, having = [*names, name], remaining_blocks
    return names, having


def shortage(blocks: Sequence[Mapping[str, float]], what: str) -> str:
    """Describe why there is too little data for mean ranks; empty if there is enough.

    Args:
        blocks: Values by method, one mapping per seed or benchmark.
        what: Name of the blocks in the text, such as ``seeds`` or ``benchmarks``.
    """
    names, _ = choose_blocks(blocks)
    if _enough(blocks, names):
        return ""
    return (
        f"No critical-difference picture: it needs {MIN_BLOCKS} {what} or more with {MIN_METHODS} "
        f"methods or more in common; {what} here: {len(blocks)}, methods in common: {len(names)}."
    )


def _enough(
    blocks: Sequence[Mapping[str, float]], names: Sequence[str], least: int = MIN_BLOCKS
) -> bool:
    return len(blocks) >= least and len(names) >= MIN_METHODS


@dataclass(frozen=True)
class RankEntry:
    """Rank of a method over several benchmarks."""

    # percentage of other methods that it beats, mean over its benchmarks; a tie counts half
    share: float
    benchmark_count: int  # number of benchmarks with the method
    place: int | None  # 1 the best; None: it is in fewer than half of the benchmarks


Cost = tuple[str, float]
"""Group within which costs are comparable, such as a processor, and the cost."""


def borda(
    benchmarks: Sequence[Mapping[str, float]], costs: Sequence[Mapping[str, Cost]] | None = None
) -> dict[str, RankEntry]:
    """Rank methods by Borda count over benchmarks, best first.

    In a benchmark with n methods, a method that beats b others and ties with e gets b + e / 2 of
    n - 1 points. Because benchmarks have different methods, shares of the possible points are
    averaged instead of adding points. Benchmarks with one method do not count.

    With costs, a method beats another only if it has the higher score at no higher cost; other
    pairs count as ties.

    Args:
        benchmarks: Scores by method, one mapping per benchmark; higher is better.
        costs: Costs by method, one mapping per benchmark.

    Returns:
        Ranks by method; methods with a place come first.
    """
    contests = [i for i, scores in enumerate(benchmarks) if len(scores) > 1]
    shares: dict[str, list[float]] = {}
    for i in contests:
        scores, cost = benchmarks[i], costs[i] if costs else {}
        for name in scores:
            points = sum(_points(name, rival, scores, cost) for rival in scores if rival != name)
            shares.setdefault(name, []).append(100 * points / (len(scores) - 1))
    means = {name: statistics.fmean(values) for name, values in shares.items()}
    often = {name for name, values in shares.items() if 2 * len(values) >= len(contests)}
    ranking = sorted(means, key=lambda name: (name not in often, -means[name]))
    return {
        name: RankEntry(
            share=means[name],
            benchmark_count=len(shares[name]),
            place=1 + sum(means[rival] > means[name] for rival in often) if name in often else None,
        )
        for name in ranking
    }


def _points(name: str, rival: str, scores: Mapping[str, float], costs: Mapping[str, Cost]) -> float:
    """Return 1 if a method beats a rival, 0 if the rival beats it, and 0.5 for a tie."""
    if scores[name] == scores[rival]:
        return 0.5
    above, below = (name, rival) if scores[name] > scores[rival] else (rival, name)
    if costs:
        (group, cost), (other_group, other_cost) = costs[above], costs[below]
        if group != other_group or cost > other_cost:
            return 0.5
    return float(above == name)


def test_differences(lines: Sequence[Line]) -> dict[str, Any]:
    """Test pairs of methods and compute mean ranks over seeds.

    Args:
        lines: Rows of one benchmark; upper bounds are left out.

    Returns:
        Template data: pairs, their number and CSV file, level, mean ranks and shortage of data.
    """
    competing = [(line, entry_of(line, COLUMNS["A_N"])) for line in lines if line.competes]
    entries = [(line.label, entry) for line, entry in competing if entry]
    pair_tests = pairs([entry for _, entry in entries])
    rows = [
        (
            label,
            [
                _pair(pair_tests.get((i, j)), label, entries[j][0])
                for j in range(i + 1, len(entries))
            ],
        )
        for i, (label, _) in enumerate(entries)
    ]
    seeds = dict.fromkeys(seed for _, entry in entries for seed in entry.by_seed)
    blocks = [
        {label: e.by_seed[seed] for label, e in entries if seed in e.by_seed} for seed in seeds
    ]
    return {
        "pairs": rows if pair_tests else [],
        "pair_count": len(pair_tests),
        "pairs_csv": _pairs_csv([label for label, _ in entries], pair_tests),
        "level": LEVEL,
        "ranks": critical(blocks),
        "shortage": shortage(blocks, "seeds"),
    }


def _pairs_csv(labels: Sequence[str], tested: Mapping[tuple[int, int], PairedComparison]) -> str:
    rows = [(labels[i], labels[j], *astuple(pair)) for (i, j), pair in tested.items()]
    return as_csv(["method", "other", "difference", "seeds", "p", "p corrected"], rows)


def _pair(pair: PairedComparison | None, better: str, worse: str) -> dict[str, str]:
    """Return a cell of the table of pairs."""
    if pair is None:
        return {
            "sign": "†",
            "kind": "untested",
            "says": f"{better} and {worse}: not tested",
            "worse": worse,
        }
    kind = "sure" if pair.corrected_p < LEVEL else "alone" if pair.p < LEVEL else "open"
    return {
        "sign": {"sure": "●", "alone": "○", "open": "≈"}[kind],
        "kind": kind,
        "worse": worse,
        "says": (
            f"{better} − {worse}: {pair.difference:.2f} points over {pair.seeds} seeds, "
            f"p {pair.p:.2g}, corrected {pair.corrected_p:.2g}"
        ),
    }
