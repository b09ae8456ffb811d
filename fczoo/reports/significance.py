"""Significance of differences between methods: tests over seeds, with their corrections."""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeVar

LEVEL = 0.05  # a difference below this p-value is significant
EQUAL_TOLERANCE = 1e-9  # values that differ by less, in points, are equal
DIGITS = 9  # decimals in which equal means agree
MIN_BLOCKS = 5  # smallest number of seeds or benchmarks for a critical difference
MIN_METHODS = 3  # smallest number of methods for a critical difference
Mark = Literal["best", "second", ""]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class SeedValues:
    """Values of one metric of one method by seed, with their mean and standard deviation."""

    by_seed: Mapping[int, float]
    mark: Mark = ""
    # whether the difference to the best is significant; None: not tested
    is_different: bool | None = None
    # whether the entry is ranked below the best of several seeds, but not tested against it
    is_untested: bool = False

    @property
    def like_best(self) -> bool:
        return self.is_different is False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def std(self) -> float | None:
        return _deviation(list(self.by_seed.values())) if len(self.by_seed) > 1 else None


def differ_significantly(a: SeedValues, b: SeedValues) -> bool | None:
    """Return whether two entries differ in a two-sided paired t test over shared seeds.

    Args:
        a: First entry.
        b: Second entry.

    Returns:
        Whether p is below ``LEVEL``; None if ``p_value`` is None.
    """
    p = p_value(a, b)
    return None if p is None else p < LEVEL


def p_value(a: SeedValues, b: SeedValues) -> float | None:
    """Return the p value of a two-sided paired t test over shared seeds.

    Args:
        a: First entry.
        b: Second entry.

    Returns:
        The p value; None with fewer than two shared seeds, or if the difference is the same for
        each seed, as with two deterministic methods.
    """
    seeds = sorted(set(a.by_seed) & set(b.by_seed))
    differences = [a.by_seed[s] - b.by_seed[s] for s in seeds]
    if not varies(differences):
        return None
    # scipy's test itself takes a hundred times as long, because it checks its arguments
    from scipy.special import stdtr

    error = _deviation(differences) / math.sqrt(len(seeds))
    return float(2 * stdtr(len(seeds) - 1, -abs(statistics.fmean(differences)) / error))


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two or more values."""
    if max(values) == min(values):  # their computed mean could differ in the last digit
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean (Student's t); None without variation.

    Args:
        values: One value per seed.

    Returns:
        Lower and upper bound, or None.
    """
    if not varies(values):
        return None
    from scipy.special import stdtrit

    error = _deviation(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, 1 - LEVEL / 2)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half


def varies(values: Sequence[float]) -> bool:
    """Return whether there are several values that differ, so that a test is possible.

    Args:
        values: One value per seed.
    """
    return len(values) > 1 and max(values) - min(values) >= EQUAL_TOLERANCE


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two entries."""

    difference: float  # of their means over the shared seeds
    seeds: int  # number of shared seeds
    p: float  # of a two-sided paired t test over the shared seeds
    corrected_p: float  # p with Holm's correction for all pairs that are tested together


def compare_pairs(entries: Sequence[SeedValues]) -> dict[tuple[int, int], PairedComparison]:
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
    corrected_p = holm_correction(p_values)
    results = {}
    for (i, j), p in p_values.items():
        a, b = entries[i].by_seed, entries[j].by_seed
        common_seeds = [seed for seed in a if seed in b]
        difference = statistics.fmean(a[seed] - b[seed] for seed in common_seeds)
        results[i, j] = PairedComparison(difference, len(common_seeds), p, corrected_p[i, j])
    return results


def holm_correction(p: Mapping[Key, float]) -> dict[Key, float]:
    """Apply Holm's step-down correction, which controls the family-wise error rate.

    Args:
        p: p values of tests that belong together, by any key.

    Returns:
        Corrected p values by the same keys, at most 1.
    """
    corrected: dict[Key, float] = {}
    largest = 0.0
    for rank, key in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[key]))
        corrected[key] = largest
    return {key: corrected[key] for key in p}


@dataclass(frozen=True)
class CriticalDifference:
    """Mean ranks over blocks, 1 the best, and Nemenyi's critical difference."""

    ranks: Mapping[str, float]  # best first
    distance: float  # critical difference at 5 %: smaller differences are not significant
    p: float  # p value of Friedman's test
    blocks: int  # number of blocks

    @property
    def is_informative(self) -> bool:
        """Return whether the critical difference is at most two thirds of the range of ranks."""
        return 3 * self.distance <= 2 * (len(self.ranks) - 1)


def critical_difference(
    blocks: Sequence[Mapping[str, float]], min_blocks: int = MIN_BLOCKS
) -> CriticalDifference | None:
    """Compute mean ranks and critical difference over the blocks and methods of ``choose_blocks``.

    Args:
        blocks: Values by method, one mapping per seed or benchmark; higher is better.
        min_blocks: Smallest number of blocks.

    Returns:
        Mean ranks with the critical difference; None with too few blocks or methods.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    names, complete_blocks = choose_blocks(blocks)
    if not _has_enough_data(blocks, names, min_blocks):
        return None
    ranks = [rankdata([-block[name] for name in names]) for block in complete_blocks]
    means = {name: statistics.fmean(row[i] for row in ranks) for i, name in enumerate(names)}
    p = float(
        friedmanchisquare(*([block[name] for block in complete_blocks] for name in names)).pvalue
    )
    k = len(names)
    q = float(studentized_range.ppf(1 - LEVEL, k, 1e6)) / math.sqrt(2)
    distance = q * math.sqrt(k * (k + 1) / (6 * len(complete_blocks)))
    mean_ranks = dict(sorted(means.items(), key=lambda item: item[1]))
    return CriticalDifference(
        mean_ranks, distance, 1.0 if math.isnan(p) else p, len(complete_blocks)
    )


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
    min_blocks = min(MIN_BLOCKS, len(blocks))
    block_counts = Counter(name for block in blocks for name in block)
    names: list[str] = []
    complete_blocks = list(blocks)
    for name, _ in block_counts.most_common():
        remaining_blocks = [block for block in complete_blocks if name in block]
        if len(remaining_blocks) >= min_blocks:
            names, complete_blocks = [*names, name], remaining_blocks
    return names, complete_blocks


def describe_shortage(blocks: Sequence[Mapping[str, float]], what: str) -> str:
    """Describe why there is too little data for mean ranks; empty if there is enough.

    Args:
        blocks: Values by method, one mapping per seed or benchmark.
        what: Name of the blocks in the text, such as ``seeds`` or ``benchmarks``.
    """
    names, _ = choose_blocks(blocks)
    if _has_enough_data(blocks, names):
        return ""
    return (
        f"No critical-difference diagram: it needs at least {MIN_BLOCKS} {what} that share "
        f"{MIN_METHODS} methods or more; {what} here: {len(blocks)}, shared methods: {len(names)}."
    )


def _has_enough_data(
    blocks: Sequence[Mapping[str, float]], names: Sequence[str], min_blocks: int = MIN_BLOCKS
) -> bool:
    return len(blocks) >= min_blocks and len(names) >= MIN_METHODS
