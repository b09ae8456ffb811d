"""Ranks of methods over benchmarks, and tables and diagrams of their differences."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from fczoo.board.charts import as_csv
from fczoo.reports.drawing import COLOURS, STYLE, import_matplotlib, picture_class
from fczoo.reports.runs import Line
from fczoo.reports.significance import (
    LEVEL,
    CriticalDifference,
    PairedComparison,
    compare_pairs,
    critical_difference,
    describe_shortage,
)
from fczoo.reports.tables import COLUMNS, entry_of

ROW_HEIGHT = 0.19  # inches per method in the diagram of critical differences


def draw_critical_difference(critical: CriticalDifference) -> Any:
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
        axes.set_xlabel("mean rank by A_N (1: best)")
        return picture


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
    ranked_benchmarks = [i for i, scores in enumerate(benchmarks) if len(scores) > 1]
    shares: dict[str, list[float]] = {}
    for i in ranked_benchmarks:
        scores, cost = benchmarks[i], costs[i] if costs else {}
        for name in scores:
            points = sum(_points(name, rival, scores, cost) for rival in scores if rival != name)
            shares.setdefault(name, []).append(100 * points / (len(scores) - 1))
    means = {name: statistics.fmean(values) for name, values in shares.items()}
    frequent_methods = {
        name for name, values in shares.items() if 2 * len(values) >= len(ranked_benchmarks)
    }
    ranking = sorted(means, key=lambda name: (name not in frequent_methods, -means[name]))
    return {
        name: RankEntry(
            share=means[name],
            benchmark_count=len(shares[name]),
            place=1 + sum(means[rival] > means[name] for rival in frequent_methods)
            if name in frequent_methods
            else None,
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
    ranked_lines = [(line, entry_of(line, COLUMNS["A_N"])) for line in lines if line.is_ranked]
    entries = [(line.label, entry) for line, entry in ranked_lines if entry]
    pair_tests = compare_pairs([entry for _, entry in entries])
    rows = [
        (
            label,
            [
                _pair_cell(pair_tests.get((i, j)), label, entries[j][0])
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
        "ranks": critical_difference(blocks),
        "shortage": describe_shortage(blocks, "seeds"),
    }


def _pairs_csv(
    labels: Sequence[str], pair_tests: Mapping[tuple[int, int], PairedComparison]
) -> str:
    rows = [(labels[i], labels[j], *astuple(pair)) for (i, j), pair in pair_tests.items()]
    return as_csv(["method", "other", "difference", "seeds", "p", "p corrected"], rows)


def _pair_cell(pair: PairedComparison | None, better: str, worse: str) -> dict[str, str]:
    """Return a cell of the table of pairs."""
    if pair is None:
        return {
            "sign": "†",
            "kind": "untested",
            "text": f"{better} and {worse}: not tested",
            "worse": worse,
        }
    kind = "not-significant"
    if pair.p < LEVEL:
        kind = "significant" if pair.corrected_p < LEVEL else "uncorrected"
    return {
        "sign": {"significant": "●", "uncorrected": "○", "not-significant": "≈"}[kind],
        "kind": kind,
        "worse": worse,
        "text": (
            f"{better} − {worse}: {pair.difference:.2f} points over {pair.seeds} seeds, "
            f"p {pair.p:.2g}, corrected {pair.corrected_p:.2g}"
        ),
    }
