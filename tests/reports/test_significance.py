"""Holm, intervals and critical differences, computed by hand."""

import math

import pytest

from fczoo.reports.significance import (
    SeedValues,
    choose_blocks,
    compare_pairs,
    critical_difference,
    describe_shortage,
    holm_correction,
    interval,
)


def test_holm_matches_hand_computation():
    """Multiply the sorted 0.01, 0.03 and 0.04 by 3, 2 and 1; keep the order."""
    corrected = holm_correction({"a": 0.01, "b": 0.04, "c": 0.03})
    assert corrected == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert list(corrected) == ["a", "b", "c"]
    assert holm_correction({0: 0.9, 1: 0.8}) == {0: 1.0, 1: 1.0}
    assert holm_correction({}) == {}


def test_interval_uses_t_distribution():
    low, high = interval([70.0, 72.0, 74.0]) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(72)
    assert (high - low) / 2 == pytest.approx(4.3027 * 2 / 3**0.5, 1e-4)
    assert interval([70.0]) is None and interval([70.0, 70.0, 70.0]) is None


def test_pairs_are_tested_over_common_seeds():
    entries = [
        SeedValues({0: 70.0, 1: 72.0, 2: 75.0, 3: 10.0}),
        SeedValues({0: 69.0, 1: 70.0, 2: 74.5}),
        SeedValues({7: 1.0}),
    ]
    results = compare_pairs(entries)
    assert list(results) == [(0, 1)]
    pair = results[0, 1]
    d = [1.0, 2.0, 0.5]
    t = (sum(d) / 3) / (math.sqrt(sum((x - sum(d) / 3) ** 2 for x in d) / 2) / math.sqrt(3))
    p = 1 - t / math.sqrt(2 + t * t)  # two-sided, two degrees of freedom
    assert (pair.seeds, pair.difference) == (3, pytest.approx(3.5 / 3))
    assert pair.p == pytest.approx(p) and pair.corrected_p == pytest.approx(p)


def test_critical_difference_matches_textbook():
    """Compute the critical difference of Demsar 2006, section 3.2.2.

    Four methods on 14 data sets: 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25.
    """
    blocks = [{"a": 4.0, "b": 3.0, "c": 2.0 + (i % 2), "d": 2.5} for i in range(14)]
    comparison = critical_difference(blocks)
    assert comparison
    assert comparison.distance == pytest.approx(2.569 * math.sqrt(20 / 84), rel=1e-3)
    assert comparison.ranks == {"a": 1.0, "b": 2.25, "d": 3.5, "c": 3.25}
    assert list(comparison.ranks)[2:] == ["c", "d"]


def test_friedman_matches_hand_computation():
    """Compute Friedman's p value by hand.

    Ranks 1, 2, 3 in five blocks: 12 * 5 / 12 * (14 - 12) = 10, p = exp(-5) at two degrees of
    freedom.
    """
    comparison = critical_difference([{"a": 3.0 + i, "b": 2.0 + i, "c": 1.0 + i} for i in range(5)])
    assert comparison
    assert comparison.p == pytest.approx(math.exp(-5))
    assert comparison.blocks == 5


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([{"a": 1.0, "b": 2.0, "c": 3.0}] * 4, "seeds here: 4, shared methods: 3"),
        ([{"a": 1.0, "b": 2.0}] * 9, "seeds here: 9, shared methods: 2"),
        ([], "seeds here: 0, shared methods: 0"),
    ],
)
def test_too_few_blocks_or_methods_are_reported(blocks, says):
    assert critical_difference(blocks) is None and says in describe_shortage(blocks, "seeds")


def test_comparison_uses_blocks_common_to_chosen_methods():
    """Compare the methods of most blocks on the blocks that all of them have.

    a has 7 blocks, b has 6 of them and c has 5 of those. d also has 6, but shares only three
    with a and b.
    """
    with_all = [{"a": 1.0, "b": 2.0, "c": 3.0}] * 3 + [{"a": 2.0, "b": 1.0, "c": 3.0, "d": 9.0}] * 2
    blocks = [
        *with_all,
        {"b": 0.0, "a": 1.0, "d": 9.0},
        {"a": 5.0, "d": 9.0},
        *[{"d": 9.0}] * 2,
    ]  # higher is better
    names, complete_blocks = choose_blocks(blocks)
    assert (sorted(names), complete_blocks) == (["a", "b", "c"], with_all)
    comparison = critical_difference(blocks)
    assert comparison
    assert comparison.ranks == {"c": 1.0, "b": pytest.approx(2.4), "a": pytest.approx(2.6)}
    assert comparison.blocks == 5
