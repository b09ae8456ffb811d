"""The numbers behind a leaderboard: differences, ranks over seeds and over benchmarks."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import friedmanchisquare, rankdata, studentized_range

from fczoo.reports.tables import LEVEL, Entry, p_value

BLOCKS = 5  # seeds or benchmarks below which no critical difference is computed
RANKED = 3  # methods, the same


@dataclass(frozen=True)
class Pair:
    """Two entries beside each other."""

    difference: float  # of their means over the seeds that both have
    seeds: int
    p: float  # of a two-sided paired t test over these seeds
    corrected: float  # the same by Holm, for all pairs that are tested together


def pairs(entries: Sequence[Entry]) -> dict[tuple[int, int], Pair]:
    """All pairs (i, j), i < j, that can be tested, with p values corrected for their number."""
    tested = {}
    for i, j in combinations(range(len(entries)), 2):
        p = p_value(entries[i], entries[j])
        if p is not None:
            tested[i, j] = p
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    found = {}
    for (i, j), p in tested.items():
        a, b = entries[i].by_seed, entries[j].by_seed
        both = [seed for seed in a if seed in b]
        difference = statistics.fmean(a[seed] - b[seed] for seed in both)
        found[i, j] = Pair(difference, len(both), p, corrected[i, j])
    return found


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: below a level, all of them are wrong together with at most its chance."""
    out, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        out[index] = largest
    return out


@dataclass(frozen=True)
class Critical:
    """Mean ranks over blocks, 1 the best; two that differ by less than ``distance`` are not told apart."""

    ranks: Mapping[str, float]  # best first
    distance: float  # Nemenyi's, at 5 %
    p: float  # of Friedman's test that all are alike
    blocks: int


def critical(blocks: Sequence[Mapping[str, float]]) -> Critical | None:
    """Over blocks that have all of ``shared``, higher values better; None where ``shortage`` says why."""
    names, having = shared(blocks)
    if not _enough(blocks, names):
        return None
    ranks = [rankdata([-block[name] for name in names]) for block in having]
    means = {name: statistics.fmean(row[i] for row in ranks) for i, name in enumerate(names)}
    p = float(friedmanchisquare(*([block[name] for block in having] for name in names)).pvalue)
    k = len(names)
    q = float(studentized_range.ppf(1 - LEVEL, k, 1e6)) / math.sqrt(2)
    distance = q * math.sqrt(k * (k + 1) / (6 * len(having)))
    ordered = dict(sorted(means.items(), key=lambda item: item[1]))
    return Critical(ordered, distance, 1.0 if math.isnan(p) else p, len(having))


def shared(blocks: Sequence[Mapping[str, float]]) -> tuple[list[str], list[Mapping[str, float]]]:
    """Methods that enough blocks have in common, and these blocks.

    Methods are taken by the number of their blocks, most first, each that leaves BLOCKS of them, or all where
    there are fewer: a choice by what was run, never by how it ended.
    """
    enough = min(BLOCKS, len(blocks))
    taken = Counter(name for block in blocks for name in block)
    names: list[str] = []
    having = list(blocks)
    for name, _ in taken.most_common():
        left = [block for block in having if name in block]
        if len(left) >= enough:
            names, having = [*names, name], left
    return names, having


def shortage(blocks: Sequence[Mapping[str, float]], what: str) -> str:
    """Why mean ranks over these blocks, such as seeds, would say nothing; empty where there is enough."""
    names, _ = shared(blocks)
    if _enough(blocks, names):
        return ""
    return (
        f"No critical-difference picture: it needs {BLOCKS} {what} or more with {RANKED} methods or more in "
        f"common; {what} here: {len(blocks)}, methods in common: {len(names)}."
    )


def _enough(blocks: Sequence[Mapping[str, float]], names: Sequence[str]) -> bool:
    return len(blocks) >= BLOCKS and len(names) >= RANKED


@dataclass(frozen=True)
class Standing:
    """A method over several benchmarks."""

    share: float  # of the other methods it beats, in percent, mean over its benchmarks; a tie is half
    taken: int  # benchmarks in which it took part
    place: int | None  # 1 the best; None where it took part in fewer than half of them


def borda(benchmarks: Sequence[Mapping[str, float]]) -> dict[str, Standing]:
    """Methods by Borda's count over benchmarks, best first, each given as method -> score, higher better.

    In a benchmark with n methods one that is above b others and level with e gets b + e / 2 points of n - 1.
    Benchmarks differ in their methods, so that shares of what could be had are averaged, not points added.
    Benchmarks with one method say nothing and do not count.
    """
    counted = [scores for scores in benchmarks if len(scores) > 1]
    shares: dict[str, list[float]] = {}
    for scores in counted:
        for name, own in scores.items():
            others = [score for other, score in scores.items() if other != name]
            points = sum(1.0 if own > score else 0.5 if own == score else 0.0 for score in others)
            shares.setdefault(name, []).append(100 * points / len(others))
    means = {name: statistics.fmean(values) for name, values in shares.items()}
    often = {name for name, values in shares.items() if 2 * len(values) >= len(counted)}
    ordered = sorted(means, key=lambda name: (name not in often, -means[name]))
    return {
        name: Standing(
            share=means[name],
            taken=len(shares[name]),
            place=1 + sum(means[other] > means[name] for other in often) if name in often else None,
        )
        for name in ordered
    }
