"""Test clients that join over time and their partitions."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.data.client_index import ClientGrowth
from fczoo.data.partition import load_partition, make_partition
from helpers_partition import seeds, some, toy_stream


def test_client_growth_matches_hand_calculation() -> None:
    """Compute GLFC's population by hand.

    30 clients at first and 10 more per task; int(0.9 x 30) = 27, int(0.9 x 40) = 36, int(0.9 x 50)
    = 45 of the earlier ones get new data.
    """
    population = ClientGrowth(30, 10, 0.9)
    assert [population.client_count(t) for t in range(10)] == [
        30,
        40,
        50,
        60,
        70,
        80,
        90,
        100,
        110,
        120,
    ]
    assert population.receivers(0, 0).tolist() == list(range(30))
    for task, (earlier, count) in enumerate([(30, 27), (40, 36), (50, 45)], 1):
        receivers = population.receivers(task, 0).tolist()
        assert receivers == sorted(set(receivers))
        assert sum(k < earlier for k in receivers) == count
        assert [k for k in receivers if k >= earlier] == list(range(earlier, earlier + 10))
    assert [ClientGrowth(30, 20, 0.9).client_count(t) for t in (0, 4)] == [30, 110]
    assert [ClientGrowth(30, 5, 0.9).client_count(t) for t in (0, 19)] == [30, 125]
    assert ClientGrowth(3).receivers(4, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "transition", "number"),
    [(3, 0.5, 1), (5, 0.75, 3), (7, 0.5, 3), (30, 0.9, 27), (10, 0.7, 7), (3, 0.9, 2)],
)
def test_number_of_earlier_clients_is_rounded_down(
    first: int, transition: float, number: int
) -> None:
    """Round the number of earlier clients down.

    int(0.75 * 5) = 3, where rounding gives 4; 0.7 * 10 is 7 in spite of floating-point errors.
    """
    receivers = ClientGrowth(first, 0, transition).receivers(1, seed=0)
    assert len(receivers) == number


@some
@given(st.integers(1, 30), st.integers(0, 10), st.floats(0, 1), st.integers(1, 9), seeds)
def test_receivers_are_unique_and_include_joining_clients(
    first: int, joining: int, transition: float, task: int, seed: int
) -> None:
    population = ClientGrowth(first, joining, transition)
    receivers, earlier = population.receivers(task, seed), first + joining * (task - 1)
    assert len(np.unique(receivers)) == len(receivers)
    assert np.isin(np.arange(earlier, earlier + joining), receivers).all()
    assert abs((receivers < earlier).sum() - transition * earlier) < 1.0001
    assert np.array_equal(receivers, population.receivers(task, seed))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "overlap:0.6"])
def test_partition_of_growing_population(spec: str, tmp_path: Path) -> None:
    partition = make_partition(toy_stream(), spec, 5, seed=3, joining=2, transition=0.6)
    assert partition.clients == 7 and partition.joined == (5, 7)
    first, second = partition.counts() > 0
    assert first.tolist() == [True] * 5 + [False] * 2
    assert second[:5].sum() == 3 and second[5:].all()
    assert [partition.client_count(t) for t in range(2)] == [5, 7]
    partition.save(tmp_path / "p.json")
    assert load_partition(tmp_path / "p.json").sha256 == partition.sha256
    again = make_partition(toy_stream(), f"file:{tmp_path / 'p.json'}", 5, joining=2)
    assert again.sha256 == partition.sha256
    with pytest.raises(FczooError, match="another number of clients joining"):
        make_partition(toy_stream(), f"file:{tmp_path / 'p.json'}", 7)


@pytest.mark.parametrize("joined", [[5], [5, 8], [0, 7], [4, 7]])
def test_partition_file_with_invalid_joins_is_rejected(tmp_path: Path, joined: list[int]) -> None:
    path = tmp_path / "p.json"
    make_partition(toy_stream(), "iid", 5, joining=2).save(path)
    content = json.loads(path.read_text())
    content["joined"] = joined
    path.write_text(json.dumps(content))
    with pytest.raises(FczooError, match="is not a valid partition file"):
        load_partition(path)


@pytest.mark.parametrize(
    ("spec", "changes", "complaint"),
    [
        ("dirichlet:0.5,scope=dataset", {"joining": 1}, "needs the same clients in every task"),
        (
            "dirichlet:0.5,scope=dataset",
            {"transition": 0.5},
            "needs the same clients in every task",
        ),
        ("dirichlet:0.5,scope=dataset", {"clients": 49}, "48 training images for 49 clients"),
        ("iid", {"transition": 0.1}, "no client gets data of task 2"),
    ],
)
def test_invalid_client_growth_is_rejected(spec: str, changes: dict, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        make_partition(toy_stream(), spec, **{"clients": 5, **changes})
