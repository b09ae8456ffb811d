"""Unequal sizes, domains and natural groups: values by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.data.partition import make_partition
from fczoo.partitioners.size import round_sizes
from helpers_partition import labels_of, seeds, some, split, table, toy_stream


def split_groups(
    spec: str, labels: np.ndarray, groups: np.ndarray, clients: int, seed: int = 0
) -> list[np.ndarray]:
    """Split images that have groups."""
    return PARTITIONERS.create(spec)(labels, clients, numpy_stream("test", seed), groups=groups)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("spec", "images", "sizes"),
    [
        ("size:0", 10, [4, 3, 3]),
        # 11/11: shares 6/11, 3/11, 2/11 of 13 are 7.09, 3.55, 2.36; the largest remainder is .55
        ("size:power:1", 13, [7, 4, 2]),
        ("size:1", 22, [12, 6, 4]),
        # shares 36/49, 9/49, 4/49
        ("size:2", 49, [36, 9, 4]),
        # 1, 2^-10 and 3^-10 of 10 images round to 10, 0, 0; two images move
        ("size:10", 10, [8, 1, 1]),
        ("size:10,min_size=3", 10, [4, 3, 3]),
        ("size:10,min_size=9", 10, [4, 3, 3]),
        ("size:1", 2, [1, 1, 0]),
    ],
)
def test_sizes_follow_power_law(spec: str, images: int, sizes: list[int]) -> None:
    assert [len(part) for part in split(spec, np.zeros(images, np.int64), 3, 0)] == sizes


def test_whole_sizes_keep_exact_shares() -> None:
    assert round_sizes(np.array([0.29, 0.71]), 100, 1).tolist() == [29, 71]


@some
@given(labels_of, st.integers(1, 9), st.sampled_from(["dirichlet-size:0.05", "size:3"]), seeds)
def test_no_client_is_empty(labels: np.ndarray, clients: int, spec: str, seed: int) -> None:
    sizes = [len(part) for part in split(spec, labels, clients, seed)]
    assert min(sizes) >= min(1, len(labels) // clients)


def test_labels_of_unequal_clients_are_iid() -> None:
    """Compare with five standard deviations; half of the images are of each class."""
    labels = np.repeat([0, 1], 5000)
    for spec in ("size:1", "dirichlet-size:1"):
        for part in split(spec, labels, 2, 3):
            ones = labels[part].sum()
            assert abs(ones - len(part) / 2) < 5 * np.sqrt(len(part)) / 2


def test_dirichlet_sizes_have_expected_variance() -> None:
    """Compare with 0.16 / (5 alpha + 1), the variance of a share of five clients.

    The shares are drawn from Dir(alpha, ..., alpha).
    """
    labels = np.zeros(10_000, np.int64)
    for alpha, variance in ((0.5, 0.16 / 3.5), (5.0, 0.16 / 26)):
        shares = [
            len(part) / 10_000
            for seed in range(150)
            for part in split(f"dirichlet-size:{alpha}", labels, 5, seed)
        ]
        assert np.var(shares) == pytest.approx(variance, rel=0.2)


def test_shares_are_equal_in_all_tasks() -> None:
    """Keep the largest client of ``size`` in every task; 48 images in 2 tasks of 24."""
    stream = toy_stream()
    assert make_partition(stream, "size:1", 3).counts().tolist() == [[13, 7, 4], [13, 7, 4]]
    partition = make_partition(stream, "dirichlet-size:0.3", 3, seed=1)
    partitioner, rng = PARTITIONERS.create("dirichlet-size:0.3"), numpy_stream("partition", 1)
    parts = partitioner(stream.train.labels, 3, rng)
    assert partition.counts().sum(0).tolist() == [len(part) for part in parts]


# ---------------------------------------------------------------- groups


def test_domains_give_one_client_per_domain() -> None:
    groups = np.array([5, 2, 2, 9, 5, 9])
    parts = split_groups("domains", np.zeros(6, np.int64), groups, 3)
    assert [sorted(part) for part in parts] == [[1, 2], [0, 4], [3, 5]]


def test_clients_of_domain_share_each_class() -> None:
    """Split two domains among five clients.

    Clients 0, 2 and 4 share the first domain, with 6 images of each of 2 classes.
    """
    labels, groups = np.tile([0, 1], 12), np.repeat([0, 1], 12)
    parts = split_groups("domains", labels, groups, 5)
    assert [set(groups[part]) for part in parts] == [{0}, {1}, {0}, {1}, {0}]
    assert table(parts, labels).tolist() == [[2, 2], [3, 3], [2, 2], [3, 3], [2, 2]]
    assert sorted(np.concatenate(parts)) == list(range(24))


def test_small_alpha_skews_clients_of_domain() -> None:
    labels, groups = np.tile([0, 1], 100), np.repeat([0, 1], 100)
    parts = split_groups("domains:0.01", labels, groups, 4)
    assert [set(groups[part]) for part in parts] == [{0}, {1}, {0}, {1}]
    counts = table(parts, labels)
    assert (np.abs(counts[:2] - counts[2:]) > 30).all()


def test_natural_gives_one_client_per_group() -> None:
    groups = np.array([7, 1, 1, 3, 7, 1])
    parts = split_groups("natural", np.zeros(6, np.int64), groups, 3)
    assert [part.tolist() for part in parts] == [[1, 2, 5], [3], [0, 4]]


def test_fewer_clients_than_groups_get_several_groups() -> None:
    groups = np.repeat(np.arange(7), 3)
    splits = [split_groups("natural", np.zeros(21, np.int64), groups, 3, s) for s in range(5)]
    for parts in splits:
        assert sorted(np.concatenate(parts)) == list(range(21))
        client_groups = [np.unique(groups[part]) for part in parts]
        assert list(map(len, client_groups)) == [3, 2, 2]  # no group has two clients
        assert [len(part) for part in parts] == [9, 6, 6]
    assert len({tuple(parts[0]) for parts in splits}) > 1


@pytest.mark.parametrize(
    ("spec", "clients", "complaint"),
    [
        ("domains", 2, "3 domains need at least as many clients, not 2; raise --clients"),
        ("domains", 6, "domain 2 has 1 images for 2 clients; lower --clients"),
        ("natural", 4, "3 groups have images, too few for 4 clients; lower --clients to 3"),
    ],
)
def test_invalid_numbers_of_clients_are_rejected(spec: str, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        split_groups(spec, np.zeros(5, np.int64), np.array([0, 1, 2, 0, 1]), clients)


def test_stream_without_groups_is_rejected() -> None:
    for spec in ("natural", "domains:0.5"):
        with pytest.raises(FczooError, match=f"--partition {spec} needs the domain, .* toy does"):
            make_partition(toy_stream(), spec, 2)


def test_groups_are_split_by_task() -> None:
    """Give a client its group's images of each task, and none of a task without them.

    The stream has 12 images of each of classes 0 to 3; tasks are classes 0, 1 and 2, 3. Group 0 has
    class 0, group 1 the others.
    """
    stream = replace(toy_stream(), groups=np.minimum(toy_stream().train.labels, 1))
    partition = make_partition(stream, "natural", 2)
    assert partition.counts().tolist() == [[12, 12], [0, 24]]
    assert partition.spec == "natural"


def test_canonical_specs_without_first_value() -> None:
    assert PARTITIONERS.canonical("domains:none") == PARTITIONERS.canonical("Domains") == "domains"
    assert PARTITIONERS.canonical("domains:alpha=.50") == "domains:0.5"
    assert PARTITIONERS.canonical("dirichlet_size:1") == "dirichlet-size:1"
