"""Borda ranks, computed by hand."""

import pytest

from fczoo.board.ranks import borda


def test_borda_matches_hand_computation():
    """Compute Borda shares and places by hand.

    a beats two methods, then none, then one with one tie: (2/2 + 0/1 + 1.5/2) / 3. c and d take
    part in one of the three ranked benchmarks.
    """
    standings = borda(
        [
            {"a": 3.0, "b": 2.0, "c": 1.0},
            {"a": 1.0, "b": 2.0},
            {"a": 5.0, "b": 5.0, "d": 1.0},
            {"c": 99.0},
        ]
    )
    assert list(standings) == ["b", "a", "c", "d"]
    assert standings["a"].share == pytest.approx(100 * (1 + 0 + 0.75) / 3)
    assert standings["b"].share == pytest.approx(100 * (0.5 + 1 + 0.75) / 3)
    assert [(s.share, s.benchmark_count, s.place) for s in standings.values()][2:] == [
        (0, 1, None),
        (0, 1, None),
    ]
    assert (standings["b"].place, standings["a"].place, standings["a"].benchmark_count) == (1, 2, 3)


def test_tied_methods_share_rank():
    standings = borda([{"a": 2.0, "b": 1.0, "c": 0.0}, {"a": 1.0, "b": 2.0, "c": 0.0}])
    assert {name: (s.share, s.place) for name, s in standings.items()} == {
        "a": (75, 1),
        "b": (75, 1),
        "c": (0, 3),
    }
    assert borda([{"a": 1.0}]) == {} == borda([])
