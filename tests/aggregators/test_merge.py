"""Aggregators on plain trees: ``fczoo.merge``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    assert (
        fczoo.merge("fedavg", [fczoo.Payload(FIVE[0], 0, 3), fczoo.Payload(FIVE[1], 1, 1)])["w"][0]
        == 1.25
    )


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_every_aggregator_accepts_plain_trees(name: str) -> None:
    result = fczoo.merge(name, FIVE)
    assert result.keys() == {"w"} and result["w"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "trees", "counts", "says"),
    [
        ("fedavg", [], None, "nothing to merge"),
        ("median", [tree(1.0), tree(1.0, name="v")], None, "tree 1 has 'v', but tree 0 does not"),
        (
            "median",
            [tree(1.0), tree(1.0, 2.0)],
            None,
            r"of tree 1 has shape \(2,\), but \(1,\) in tree 0",
        ),
        ("fedavg", FIVE, [1, 2], "give 5 whole numbers above 0"),
        ("fedavg", FIVE, [1, 2, 0, 4, 5], "give 5 whole numbers above 0"),
        ("fedavg", FIVE, [1, 2, float("nan"), 4, 5], "give 5 whole numbers above 0"),
        ("capped", FIVE, [1, 2, 2.5, 4, 5], "give 5 whole numbers above 0"),
        ("fedavg", FIVE, [1, 2, "3", 4, 5], "give 5 whole numbers above 0"),
        ("krum", FIVE[:2], None, "krum:1 needs at least 4 uploads"),
        (
            "prototype_reweight",
            FIVE,
            None,
            "reads 'prototype', which the trees do not have; they have w",
        ),
        ("medain", FIVE, None, "did you mean median"),
    ],
)
def test_invalid_inputs_are_rejected(name, trees, counts, says: str) -> None:
    with pytest.raises(FczooError, match=says):
        fczoo.merge(name, trees, counts)


INTEGERS = [{"w": torch.tensor([1, 2])}, {"w": torch.tensor([2, 3])}, {"w": torch.tensor([4, 9])}]


@pytest.mark.parametrize(
    ("name", "values", "dtype"),
    [
        ("fedavg", [7 / 3, 14 / 3], torch.float64),
        ("uniform", [7 / 3, 14 / 3], torch.float64),
        ("capped", [7 / 3, 14 / 3], torch.float64),
        ("median", [2, 3], torch.float64),
        ("trimmed_mean:0", [7 / 3, 14 / 3], torch.float64),
        ("norm_clip:100", [7 / 3, 14 / 3], torch.float64),
        ("multi_krum:0", [7 / 3, 14 / 3], torch.float64),
        ("krum:0", [1, 2], torch.int64),  # one of the uploads, unchanged
    ],
)
def test_means_of_integers_are_not_truncated(name: str, values: list[float], dtype) -> None:
    result = fczoo.merge(name, INTEGERS)["w"]
    assert result.dtype == dtype
    assert result.tolist() == pytest.approx(values, abs=1e-12)


def test_merge_of_other_dtypes() -> None:
    small = [{"w": torch.tensor([v], dtype=torch.uint8)} for v in (250, 1)]
    assert fczoo.merge("fedavg", small)["w"].tolist() == [125.5]
    flags = [{"w": torch.tensor([v])} for v in (True, False)]
    assert fczoo.merge("uniform", flags)["w"].tolist() == [0.5]
    numbers = [{"w": torch.tensor([1])}, {"w": torch.tensor([2.5])}]
    assert fczoo.merge("fedavg", numbers)["w"].tolist() == [1.75]
    half = [{"w": torch.tensor([v], dtype=torch.float16)} for v in (60_000, -60_000)]
    assert fczoo.merge("uniform", half)["w"].tolist() == [0]


@pytest.mark.parametrize("name", AGGREGATORS.names())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_rejected(name: str, bad: float) -> None:
    trees = [*FIVE[:3], tree(1.0, bad), FIVE[4]]
    with pytest.raises(FczooError, match=r"^'w' of client 3 has values that are not finite; "):
        fczoo.merge(name, trees)


def test_error_names_client_number() -> None:
    with pytest.raises(FczooError, match="'w' of client 8 "):
        fczoo.merge("fedavg", [fczoo.Payload(tree(1.0), 7), fczoo.Payload(tree(float("nan")), 8)])


@pytest.mark.parametrize("name", AGGREGATORS.names())
@given(
    values=st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=7),
    dtype=st.sampled_from([torch.int64, torch.float64]),
)
def test_merged_value_lies_between_client_values(
    name: str, values: list[int], dtype: torch.dtype
) -> None:
    result = float(fczoo.merge(name, [{"w": torch.tensor([v], dtype=dtype)} for v in values])["w"])
    rounding = 1e-3
    assert min(values) - rounding <= result <= max(values) + rounding


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=7), st.data())
def test_weighted_mean_of_integers_by_hand(values: list[int], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 1000), min_size=len(values), max_size=len(values)))
    average = fczoo.merge("fedavg", [{"w": torch.tensor([v])} for v in values], counts)["w"]
    right = sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
    assert float(average) == pytest.approx(right, rel=1e-9, abs=1e-2)
