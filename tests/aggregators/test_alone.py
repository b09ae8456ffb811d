"""Aggregators on plain trees: ``fczoo.merge``."""

import pytest
import torch

import fczoo
from fczoo.core.errors import FczooError
from fczoo.core.registry import AGGREGATORS


def tree(*values: float, name: str = "w") -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values)}


FIVE = [tree(v, 2 * v) for v in (1.0, 2.0, 3.0, 4.0, 90.0)]


def test_values_by_hand() -> None:
    assert fczoo.merge("uniform", FIVE)["w"].tolist() == [20, 40]
    assert fczoo.merge("median", FIVE)["w"].tolist() == [3, 6]
    assert fczoo.merge("trimmed_mean:1", FIVE)["w"].tolist() == [3, 6]
    assert fczoo.merge("fedavg", FIVE[:2], [3, 1])["w"].tolist() == [1.25, 2.5]
    assert fczoo.merge("fedavg", [fczoo.Payload(FIVE[0], 0, 3), fczoo.Payload(FIVE[1], 1, 1)])["w"][0] == 1.25


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_every_aggregator_takes_plain_trees(name: str) -> None:
    merged = fczoo.merge(name, FIVE)
    assert merged.keys() == {"w"} and merged["w"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "trees", "counts", "says"),
    [
        ("fedavg", [], None, "nothing to merge"),
        ("median", [tree(1.0), tree(1.0, name="v")], None, "tree 1 has 'v', tree 0 has not"),
        ("median", [tree(1.0), tree(1.0, 2.0)], None, r"of tree 1 has shape \(2,\), in tree 0 \(1,\)"),
        ("fedavg", FIVE, [1, 2], "give 5 whole numbers above 0"),
        ("krum", FIVE[:2], None, "krum:1 needs 4 uploads"),
        ("prototype_reweight", FIVE, None, "reads 'prototype', which the trees do not have; they have w"),
        ("medain", FIVE, None, "did you mean median"),
    ],
)
def test_what_is_missing_is_said(name, trees, counts, says: str) -> None:
    with pytest.raises(FczooError, match=says):
        fczoo.merge(name, trees, counts)
