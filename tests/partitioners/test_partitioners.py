"""What every partitioner has to keep, IID shares, and how specs are read."""

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.core.registry import PARTITIONERS
from fczoo.partitioners.dirichlet import Dirichlet
from fczoo.partitioners.quantity import Quantity
from helpers_partition import labels_of, seeds, some, split, table

# A spec of each partitioner that can be met by any of the labels that ``labels_of`` draws.
SPECS = {
    "iid": ["iid"],
    "dirichlet": [
        "dirichlet:0.1",
        "dirichlet:0.5",
        "dirichlet:beta=1,draw=sample",
        "dirichlet:beta=0.2,cap=true",
    ],
}
SPECS["quantity"] = ["quantity:1", "quantity:2"]
DISJOINT = [spec for name in SPECS for spec in SPECS[name]]
SPECS |= {"overlap": ["overlap:0.6", "overlap:1"], "shards": ["shards:1,shards=2", "shards:2,shards=2"]}
specs = pytest.mark.parametrize(
    "spec", [spec for name in PARTITIONERS.names("fczoo.partitioners") for spec in SPECS.get(name, [name])]
)


def test_every_partitioner_has_a_spec_here() -> None:
    assert set(PARTITIONERS.names("fczoo.partitioners")) == SPECS.keys()


# ---------------------------------------------------------------- what every partitioner has to keep


@specs
@some
@given(labels_of, st.integers(1, 9), seeds, st.randoms(use_true_random=False))
def test_pure(spec: str, labels: np.ndarray, clients: int, seed: int, order) -> None:
    """One part a client, of positions that are there, each once; the same from the same seed; nothing is changed."""
    assume(not spec.startswith("quantity") or clients > labels.max())
    labels = labels[order.sample(range(len(labels)), len(labels))]
    before = labels.copy()
    parts = split(spec, labels, clients, seed)
    assert len(parts) == clients
    assert all(len(np.unique(p)) == len(p) and ((p >= 0) & (p < len(labels))).all() for p in parts)
    assert np.array_equal(labels, before)
    assert all(np.array_equal(a, b) for a, b in zip(parts, split(spec, labels, clients, seed), strict=True))


@pytest.mark.parametrize("spec", DISJOINT)
@some
@given(labels_of, st.integers(5, 9), seeds, st.randoms(use_true_random=False))
def test_disjoint_and_covering(spec: str, labels: np.ndarray, clients: int, seed: int, order) -> None:
    labels = labels[order.sample(range(len(labels)), len(labels))]
    parts = split(spec, labels, clients, seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert table(parts, labels).sum() == len(labels)


@pytest.mark.parametrize("spec", [*DISJOINT, "overlap:0.6", "shards:2"])
def test_another_seed_is_another_split(spec: str) -> None:
    labels = np.repeat(np.arange(5), 40)
    splits = {tuple(tuple(np.sort(p)) for p in split(spec, labels, 5, seed)) for seed in range(5)}
    assert len(splits) == 5


@pytest.mark.parametrize("name", ["iid", "dirichlet", "quantity", "overlap:1", "shards:2,shards=2"])
@some
@given(labels_of, seeds)
def test_a_single_client_gets_all(name: str, labels: np.ndarray, seed: int) -> None:
    (part,) = split(f"quantity:{labels.max() + 1}" if name == "quantity" else name, labels, 1, seed)
    assert np.array_equal(np.sort(part), np.arange(len(labels)))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:100", "dirichlet:beta=100,draw=sample", "quantity:1"])
def test_images_of_a_class_are_drawn(spec: str) -> None:
    """No client gets a run of neighbours, which in many data sets resemble each other."""
    for part in split(spec, np.zeros(60, np.int64), 2, 0):
        assert len(part) > 10 and (np.diff(np.sort(part)) > 1).sum() > 5


# ---------------------------------------------------------------- iid


@some
@given(labels_of, st.integers(1, 9), seeds)
def test_iid_shares_are_equal(labels: np.ndarray, clients: int, seed: int) -> None:
    counts = table(split("iid", labels, clients, seed), labels)
    assert (counts.max(0) - counts.min(0) <= 1).all()


# ---------------------------------------------------------------- specs


def test_specs_name_fields() -> None:
    assert PARTITIONERS.create("dirichlet:0.3") == Dirichlet(beta=0.3)
    assert (
        PARTITIONERS.create("dirichlet")
        == PARTITIONERS.create("dirichlet:")
        == Dirichlet(beta=0.5, draw="split", cap=False)
    )
    assert PARTITIONERS.create("dirichlet:beta=0.1,min_size=2") == Dirichlet(0.1, min_size=2)
    assert PARTITIONERS.create("dirichlet:0.1,cap=true,draw=sample") == Dirichlet(0.1, "sample", True)
    assert PARTITIONERS.create("quantity:3") == Quantity(3)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("dirchlet:0.5", "did you mean dirichlet"),
        ("zipf", "known: "),
        ("", "no partitioner is called ''"),
        ("dirichlet:x", "dirichlet.beta is 'x'; it must be float"),
        ("dirichlet:nan", "dirichlet.beta is 'nan'"),
        ("dirichlet:1e999", "dirichlet.beta is"),
        ("dirichlet:0", "must be at least 1e-06"),
        ("dirichlet:-1", "must be at least 1e-06"),
        ("dirichlet:0.5,0.1", "cannot read '0.1'"),
        ("dirichlet:bta=0.5", "has no option 'bta'; did you mean beta"),
        ("dirichlet:min_size=2.5", "dirichlet.min_size is 2.5; it must be int"),
        ("dirichlet:draw=cut", "must be split | sample"),
        ("dirichlet:max_tries=0", "must be at least 1"),
        ("quantity:0", "must be at least 1"),
        ("quantity:true", "it must be int"),
        ("iid:3", "cannot read '3'"),
    ],
)
def test_specs_that_cannot_be_read(spec: str, complaint: str) -> None:
    with pytest.raises(FczooError, match=re.escape(complaint)):
        PARTITIONERS.create(spec)
