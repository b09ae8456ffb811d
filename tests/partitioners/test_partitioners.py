"""Rules for every partitioner, IID shares, and the parsing of specs."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.core.registry import PARTITIONERS
from fczoo.partitioners.dirichlet import Dirichlet
from fczoo.partitioners.quantity import Quantity
from fczoo.testing import check_partitioner
from fczoo.testing.data_parts import Refuses
from helpers_partition import labels_of, seeds, some, split, table

# Specs of each partitioner, with the requests that they cannot meet.


def never(images: int, classes: int, clients: int) -> bool:
    return False


def infeasible_alpha(alpha: int) -> Refuses:
    """Return a predicate of splits that ``quantity:ALPHA`` cannot meet.

    Classes are too few for one client, or too many for all clients together.
    """
    return lambda images, classes, clients: alpha > classes or alpha * clients < classes


def fewer_than(shards: int) -> Refuses:
    return lambda images, classes, clients: images < shards


def fewer_clients_than_domains(images: int, classes: int, clients: int) -> bool:
    """Return whether a domain has no client, or fewer images than clients.

    Image i is of domain i modulo 8. So each domain has an image if there are as many images as
    clients.
    """
    return clients < min(8, images) or clients > images


def more_clients_than_groups(images: int, classes: int, clients: int) -> bool:
    return clients > min(8, images)


SPECS: dict[str, dict[str, Refuses]] = {
    "iid": {"iid": never},
    "dirichlet": dict.fromkeys(
        [
            "dirichlet:0.1",
            "dirichlet:0.5",
            "dirichlet:beta=1,draw=sample",
            "dirichlet:beta=0.2,cap=true",
        ],
        never,
    ),
    "quantity": {"quantity:1": infeasible_alpha(1), "quantity:2": infeasible_alpha(2)},
    "overlap": {"overlap:0.6": never, "overlap:1": never},
    "shards": {
        "shards:1,shards=2": fewer_than(2),
        "shards:2,shards=2": fewer_than(2),
        "shards:2,shards=20": fewer_than(20),
        "shards:2": fewer_than(100),
    },
    "size": {"size:1.2": never, "size:power=0,min_size=3": never, "size:2,scope=dataset": never},
    "dirichlet-size": {"dirichlet-size:0.1": never, "dirichlet-size:1,scope=task": never},
    "domains": dict.fromkeys(["domains", "domains:0.3"], fewer_clients_than_domains),
    "natural": {"natural": more_clients_than_groups},
}
FEW_OUTCOMES = {
    "overlap:1",
    "shards:1,shards=2",
    "shards:2,shards=2",
    "domains",
    "domains:0.3",
    "natural",
}  # so few outcomes that seeds agree; one client per group has one outcome


def test_every_partitioner_has_test_spec() -> None:
    assert set(PARTITIONERS.names("fczoo.partitioners")) == SPECS.keys()


@pytest.mark.parametrize(
    ("spec", "refuses"),
    [(spec, refuses) for specs in SPECS.values() for spec, refuses in specs.items()],
)
def test_every_partitioner_passes_check(spec: str, refuses: Refuses) -> None:
    check_partitioner(spec, refuses, is_random=spec not in FEW_OUTCOMES)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "quantity", "overlap:1", "shards:2,shards=2"])
@some
@given(labels_of, seeds)
def test_single_client_gets_all_images(name: str, labels: np.ndarray, seed: int) -> None:
    (part,) = split(f"quantity:{labels.max() + 1}" if name == "quantity" else name, labels, 1, seed)
    assert np.array_equal(np.sort(part), np.arange(len(labels)))


@pytest.mark.parametrize(
    "spec", ["iid", "dirichlet:100", "dirichlet:beta=100,draw=sample", "quantity:1"]
)
def test_images_of_class_are_drawn_at_random(spec: str) -> None:
    """Give no client a run of neighbours, which in many data sets resemble each other."""
    for part in split(spec, np.zeros(60, np.int64), 2, 0):
        assert len(part) > 10 and (np.diff(np.sort(part)) > 1).sum() > 5


# ---------------------------------------------------------------- iid


@some
@given(labels_of, st.integers(1, 9), seeds)
def test_iid_shares_are_equal(labels: np.ndarray, clients: int, seed: int) -> None:
    counts = table(split("iid", labels, clients, seed), labels)
    assert (counts.max(0) - counts.min(0) <= 1).all()


# ---------------------------------------------------------------- specs


def test_specs_set_fields() -> None:
    assert PARTITIONERS.create("dirichlet:0.3") == Dirichlet(beta=0.3)
    assert PARTITIONERS.create("dirichlet") == Dirichlet(beta=0.5, draw="split", cap=False)
    assert PARTITIONERS.create("dirichlet:beta=0.1,min_size=2") == Dirichlet(0.1, min_size=2)
    assert PARTITIONERS.create("dirichlet:0.1,cap=true,draw=sample") == Dirichlet(
        0.1, "sample", True
    )
    assert PARTITIONERS.create("quantity:3") == Quantity(3)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("dirchlet:0.5", "did you mean dirichlet"),
        ("zipf", "known: "),
        ("", "no partitioner is called ''"),
        ("dirichlet:", "partitioner 'dirichlet:' has no value after the colon"),
        ("dirichlet:x", "dirichlet.beta is 'x'; it must be a finite number"),
        ("dirichlet:nan", "dirichlet.beta is 'nan'"),
        ("dirichlet:1e999", "dirichlet.beta is"),
        ("dirichlet:0", "must be at least 1e-06"),
        ("dirichlet:-1", "must be at least 1e-06"),
        ("dirichlet:0.5,0.1", "cannot read '0.1'"),
        ("dirichlet:bta=0.5", "has no option 'bta'; did you mean beta"),
        ("dirichlet:min_size=2.5", "dirichlet.min_size is '2.5'; it must be a whole number"),
        ("dirichlet:draw=cut", "must be split | sample"),
        ("dirichlet:max_tries=0", "must be at least 1"),
        ("quantity:0", "must be at least 1"),
        ("quantity:true", "it must be a whole number"),
        ("iid:3", "partitioner iid has no options; write iid instead of iid:3"),
    ],
)
def test_invalid_specs_are_rejected(spec: str, complaint: str) -> None:
    with pytest.raises(FczooError, match=re.escape(complaint)):
        PARTITIONERS.create(spec)
