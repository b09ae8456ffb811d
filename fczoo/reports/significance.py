"""Significance of differences between methods: paired t tests over seeds, and intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.05  # a difference below this p-value is significant
EQUAL_TOLERANCE = 1e-9  # values that differ by less, in points, are equal
DIGITS = 9  # decimals in which equal means agree
Mark = Literal["best", "second", ""]


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


def significant(a: SeedValues, b: SeedValues) -> bool | None:
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
