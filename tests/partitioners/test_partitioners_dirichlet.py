"""The Dirichlet partitioner, for each task and over the whole data set."""

import logging

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fczoo.core.seeds import numpy_stream
from fczoo.data.partition import make_partition
from fczoo.partitioners.dirichlet import Dirichlet
from helpers_partition import labels_of, seeds, some, split, table, toy_stream


@some
@given(
    labels_of,
    st.integers(2, 9),
    st.floats(0.01, 1),
    st.integers(1, 8),
    st.sampled_from(["split", "sample"]),
    st.booleans(),
    seeds,
)
def test_dirichlet_min_size(
    caplog,
    labels: np.ndarray,
    clients: int,
    beta: float,
    min_size: int,
    draw: str,
    cap: bool,
    seed: int,
) -> None:
    """Give every client the minimum size by a draw or by the repair, which is logged.

    The minimum is capped at an equal share.
    """
    assume(len(labels) >= clients)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        parts = Dirichlet(beta, draw, cap, min_size, max_tries=3)(
            labels, clients, numpy_stream("test", seed)
        )
    smallest = min(min_size, len(labels) // clients)
    assert min(map(len, parts)) >= smallest >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    if caplog.records:
        assert len(caplog.records) == 1
        assert f"fewer than {smallest} images in each of 3 draws" in caplog.messages[0]


def test_dirichlet_warns_only_of_repair(caplog) -> None:
    labels = np.repeat(np.arange(2), 10)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        Dirichlet(100.0, min_size=1)(labels, 2, numpy_stream("test", 0))
        assert not caplog.records
        parts = Dirichlet(1e-6, min_size=5, max_tries=4)(
            labels, 4, numpy_stream("test", 0)
        )  # two owners at most before the repair
    assert len(caplog.records) == 1
    assert [len(p) for p in parts] == [5, 5, 5, 5]


def test_dirichlet_with_large_beta_is_nearly_iid() -> None:
    labels = np.repeat(np.arange(4), 100)
    assert (
        np.abs(table(split("dirichlet:1e6", labels, 5, 0), labels) - 20).max() <= 1
    )  # cut at cumulative shares, rounded down
    samples = table(split("dirichlet:beta=1e6,draw=sample", labels, 5, 0), labels)
    assert (
        np.abs(samples - 20).max() <= 20
    )  # 5 standard deviations of a binomial with n = 100, p = 1/5: sqrt(16) = 4


def test_dirichlet_skew_grows_as_beta_falls() -> None:
    labels = np.repeat(np.arange(4), 100)

    def share(beta: float) -> float:
        """Return the mean largest share of a class over 20 seeds."""
        return float(
            np.mean(
                [
                    table(split(f"dirichlet:beta={beta},min_size=1", labels, 5, s), labels).max(0)
                    / 100
                    for s in range(20)
                ]
            )
        )

    shares = [share(beta) for beta in (0.05, 0.3, 2.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert shares[-1] < 0.3


@pytest.mark.parametrize(
    ("spec", "recorded"),
    [
        ("dirichlet:0.5,draw=sample", (7.90, 0.390, 38.7)),  # fed-mammoth
        ("dirichlet:1,draw=sample", (9.21, 0.299, 30.3)),
        ("dirichlet:0.5,cap=on,min_size=10", (7.75, 0.414, 25.1)),  # PILoRA
        ("dirichlet:1,cap=on,min_size=10", (8.72, 0.322, 19.6)),
    ],
)
def test_dirichlet_matches_released_code(spec: str, recorded: tuple[float, float, float]) -> None:
    """Match the distribution of released code.

    Means over 40 seeds of its splits of 10 x 100 images over 10 clients: classes per client,
    largest share of a class, standard deviation of the clients' sizes.
    """
    labels = np.repeat(np.arange(10), 100)
    counts = np.array(
        [table(split(f"{spec},max_tries=10000", labels, 10, seed), labels) for seed in range(40)]
    )
    ours = (counts > 0).sum(2).mean(1), (counts.max(1) / 100).mean(1), counts.sum(2).std(1)
    for value, official in zip(ours, recorded, strict=True):
        assert abs(value.mean() - official) < 0.01 + 3 * value.std(ddof=1) * (2 / 40) ** 0.5


def test_dirichlet_cap_skips_full_clients() -> None:
    """Give nothing of a class to a client that already holds an equal share."""
    labels = np.repeat(np.arange(8), 25)
    for seed in range(10):
        counts = table(
            Dirichlet(0.2, cap=True, min_size=1)(labels, 4, numpy_stream("test", seed)), labels
        )
        earlier_totals = np.cumsum(counts, 1) - counts
        assert (counts[earlier_totals >= 50] == 0).all()
        assert counts.sum(1).max() < 50 + 25
    free = [
        table(Dirichlet(0.2, min_size=1)(labels, 4, numpy_stream("test", s)), labels).sum(1).max()
        for s in range(10)
    ]
    assert max(free) >= 75


class CountedDraws:
    """Count the draws of a Dirichlet partitioner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.number, once = 0, Dirichlet._draw_owners

        def draw_and_count(*args: object) -> list[np.ndarray]:
            self.number += 1
            return once(*args)

        monkeypatch.setattr(Dirichlet, "_draw_owners", draw_and_count)


def test_dirichlet_terminates_with_many_clients(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    draws = CountedDraws(monkeypatch)
    labels = np.repeat(np.arange(10), 100)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        parts = Dirichlet(0.01, max_tries=20)(labels, 500, numpy_stream("test", 0))
    assert draws.number == 20 and len(caplog.records) == 1
    assert [len(p) for p in parts] == [2] * 500
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_reserve_gives_each_of_100_clients_six_images(caplog) -> None:
    """Split as in HGP's appendix E, where draws without a reserve never succeed.

    Ten classes have 500 images each; beta is 0.05.
    """
    labels = np.repeat(np.arange(10), 500)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        parts = Dirichlet(0.05, "sample", max_tries=10_000, reserve=7)(
            labels, 100, numpy_stream("test", 0)
        )
    assert not caplog.records
    assert min(map(len, parts)) >= 6
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(5000))


def test_reserved_images_stay_with_client() -> None:
    """Give one client all images but the reserved ones at a vanishing beta."""
    labels = np.zeros(1000, np.int64)
    parts = Dirichlet(1e-6, min_size=1, reserve=3)(labels, 2, numpy_stream("test", 0))
    assert sorted(map(len, parts)) == [3, 997]


def test_dirichlet_stops_at_first_valid_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = CountedDraws(monkeypatch)
    Dirichlet(1000.0, min_size=1)(np.repeat(np.arange(5), 50), 5, numpy_stream("test", 0))
    assert draws.number == 1


@pytest.mark.parametrize("draw", ["split", "sample"])
def test_dirichlet_of_vanishing_beta(draw: str) -> None:
    """Give every image an owner at a vanishing beta.

    A class goes to one client. If that client is full, no share is left.
    """
    labels = np.repeat(np.arange(3), 20)
    for seed in range(10):
        parts = Dirichlet(1e-6, draw, cap=True, min_size=1, max_tries=2)(
            labels, 3, numpy_stream("test", seed)
        )
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60))


# ---------------------------------------------------------------- the whole data set at once


@some
@given(
    st.integers(2, 8),
    st.sampled_from([0.01, 0.3, 2.0]),
    st.sampled_from(["split", "sample"]),
    st.sampled_from(["on", "off"]),
    seeds,
)
def test_dirichlet_over_whole_data_set(
    clients: int, beta: float, draw: str, cap: str, seed: int
) -> None:
    """Split all images into disjoint parts, with the minimum size over all tasks together.

    A client may have no images of a task.
    """
    partition = make_partition(
        toy_stream(),
        f"dirichlet:{beta},scope=dataset,draw={draw},cap={cap},max_tries=5",
        clients,
        seed,
    )
    everything = np.concatenate([c for task in partition.tasks for c in task])
    assert np.array_equal(np.sort(everything), toy_stream().train_index)
    assert partition.counts().sum(0).min() >= min(6, 48 // clients)
    for task, parts in zip(toy_stream().tasks, partition.tasks, strict=True):
        labels = toy_stream().train.labels[(np.concatenate(parts) - 1) // 2]
        assert ((labels >= task.start) & (labels < task.stop)).all()


def test_client_may_lack_data_of_task() -> None:
    counts = [
        make_partition(toy_stream(), "dirichlet:0.01,scope=dataset,min_size=1", 4, seed).counts()
        for seed in range(10)
    ]
    assert any((c == 0).any() for c in counts)
    assert all((c.sum(0) > 0).all() for c in counts)
