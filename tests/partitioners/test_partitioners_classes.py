"""Partitioners that hand out classes or pieces of them: quantity, overlap, shards."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.core.seeds import numpy_stream
from fczoo.partitioners.quantity import Quantity
from helpers_partition import labels_of, seeds, some, split, table

# ---------------------------------------------------------------- quantity


@some
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(1, 30), seeds)
def test_quantity_gives_exactly_alpha_classes(
    alpha: int, classes: int, clients: int, tries: int, seed: int
) -> None:
    assume(alpha <= classes <= alpha * clients)
    labels = np.repeat(np.arange(classes), 2 * clients)
    counts = table(Quantity(alpha, tries)(labels, clients, numpy_stream("test", seed)), labels)
    assert ((counts > 0).sum(1) == alpha).all()
    assert (counts > 0).any(0).all()
    for shares in counts.T:  # equal shares among the owners
        assert np.ptp(shares[shares > 0]) <= 1


def test_quantity_draws_owner_per_image() -> None:
    """Give each image to one random owner of its class.

    Shares are those of a fair die.
    """
    labels = np.repeat(np.arange(4), 3000)
    parts = split("quantity:2,draw=sample", labels, 4, 0)
    counts, equal = table(parts, labels), table(split("quantity:2", labels, 4, 0), labels)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert ((counts > 0) == (equal > 0)).all() and ((equal > 0).sum(1) == 2).all()
    assert (np.abs(counts - equal)[equal < 3000] < 150).all()
    assert (counts != equal).any()


def test_quantity_repair_covers_every_class() -> None:
    """Cover every class with the repair.

    Six clients have one class each of six: a draw covers all in 6!/6^6 = 1.5 % of cases.
    """
    labels = np.repeat(np.arange(6), 12)
    for seed in range(10):
        counts = table(Quantity(1, max_tries=1)(labels, 6, numpy_stream("test", seed)), labels)
        assert sorted(counts.argmax(1)) == list(range(6))
        assert (counts.max(1) == 12).all()


@pytest.mark.parametrize(
    ("alpha", "clients", "complaint"),
    [
        (5, 10, "more classes than the 4 of a task"),
        (1, 3, "cannot cover the 4 classes"),
        (2, 1, "cannot cover the 4 classes"),
    ],
)
def test_infeasible_quantity_is_rejected(alpha: int, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        Quantity(alpha)(np.repeat(np.arange(4), 10), clients, numpy_stream("test", 0))


# ---------------------------------------------------------------- overlap


@some
@given(labels_of, st.integers(1, 40), st.floats(0, 1), seeds)
def test_overlap_gives_whole_classes(
    labels: np.ndarray, clients: int, fraction: float, seed: int
) -> None:
    counts = table(split(f"overlap:{fraction:.17f}", labels, clients, seed), labels)
    sizes = np.bincount(labels)
    assert ((counts == 0) | (counts == sizes)).all()
    assert ((counts > 0).sum(1) == max(1, round(fraction * len(sizes)))).all()


def test_overlap_draws_each_class_equally_often() -> None:
    """Compare with five standard deviations, sqrt(1000 x 0.6 x 0.4) = 15.5.

    Clients have 6 of 10 classes, so a class has about 600 of 1000 owners.
    """
    labels = np.repeat(np.arange(10), 2)
    owners = (table(split("overlap:0.6", labels, 1000, 0), labels) > 0).sum(0)
    assert np.abs(owners - 600).max() < 78


# ---------------------------------------------------------------- shards


@some
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), seeds)
def test_shards_stay_whole(alpha: int, per_class: int, size: int, clients: int, seed: int) -> None:
    """Give a client ``alpha`` different shards of one class each.

    Four classes have ``per_class`` shards of ``size`` images.
    """
    assume(alpha <= 4 * per_class)
    labels = np.repeat(np.arange(4), per_class * size)
    for part in split(f"shards:{alpha},shards={4 * per_class}", labels, clients, seed):
        assert len(part) == alpha * size
        shard_counts = np.bincount(part // size, minlength=4 * per_class)
        assert sorted(shard_counts[shard_counts > 0]) == [size] * alpha


@pytest.mark.parametrize(
    ("alpha", "recorded"),
    [(2, (1.93, 0.509, 1.38)), (4, (3.49, 0.406, 0.10)), (6, (4.82, 0.313, 0.03))],
)
def test_shards_match_released_code(alpha: int, recorded: tuple[float, float, float]) -> None:
    """Match the distribution of PILoRA's released code.

    Means over 40 seeds of its split of 10 x 400 images: classes per client, largest share of a
    class (0 if no client has it), classes that no client has.
    """
    labels = np.repeat(np.arange(10), 400)
    counts = np.array(
        [table(split(f"shards:{alpha}", labels, 10, seed), labels) for seed in range(40)]
    )
    holds = counts > 0
    assert (counts.sum(2) == 40 * alpha).all()
    shares = counts.max(1) / np.maximum(counts.sum(1), 1)
    ours = holds.sum(2).mean(1), shares.mean(1), (~holds.any(1)).sum(1)
    for value, official in zip(ours, recorded, strict=True):
        assert abs(value.mean() - official) < 3 * max(value.std(ddof=1), 0.1) * (2 / 40) ** 0.5


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("shards:5,shards=4", "more than the 4 shards"),
        ("shards:2", "cannot be cut into 100 shards"),
    ],
)
def test_infeasible_shards_are_rejected(spec: str, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        split(spec, np.repeat(np.arange(4), 10), 3, 0)
