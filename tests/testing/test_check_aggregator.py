"""``check_aggregator`` on aggregators that are broken on purpose."""

from collections.abc import Callable

import pytest
import torch

from fczoo.aggregators.averaging import uniform
from fczoo.testing import check_aggregator


def lowest(payloads):
    return {name: torch.stack([p[name] for p in payloads]).amin(0) for name in payloads[0]}


def total(payloads):
    return {name: sum(p[name] for p in payloads) for name in payloads[0]}


def unsorted_choice(payloads):
    return {name: value.clone() for name, value in payloads[-1].items()}


def drifting(payloads):
    return {name: value + 1e-3 for name, value in uniform(payloads).items()}


def in_double(payloads):
    return {name: value.double() for name, value in uniform(payloads).items()}


def in_place(payloads):
    for payload in payloads:
        payload["head"].abs_()
    return uniform(payloads)


def by_chance(payloads):
    part = torch.rand(())
    return {
        name: part * payloads[0][name] + (1 - part) * value
        for name, value in uniform(payloads).items()
    }


@pytest.mark.parametrize(
    ("merge", "says"),
    [
        (lambda payloads: dict(payloads[0]), "returns the memory of an upload as"),
        (lambda payloads: {"head": uniform(payloads)["head"]}, "loses the parameter prompt"),
        (in_double, "makes torch.float64 .* of torch.bfloat16"),
        (total, "merges head to a value outside those of all clients"),
        (drifting, "(merges head to a value outside|changes head, on which all clients agree)"),
        (unsorted_choice, "depends on the order of the clients"),
        (in_place, "changes an upload in place"),
        (by_chance, "gives another tree from the same uploads"),
    ],
)
def test_a_broken_aggregator_is_refused(merge: Callable, says: str) -> None:
    merge.name = "broken"
    with pytest.raises(AssertionError, match=f"broken {says}"):
        check_aggregator(merge)


def test_too_few_uploads_must_be_refused() -> None:
    check_aggregator(lowest)
    with pytest.raises(
        AssertionError, match="median merges 2 uploads; raise FczooError for fewer than it needs"
    ):
        check_aggregator("median", fewest=3)
