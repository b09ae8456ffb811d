"""``check_aggregator`` on aggregators that are broken on purpose."""

from collections.abc import Callable

import pytest
import torch

from fczoo.aggregators.averaging import uniform
from fczoo.testing import check_aggregator


def minimum(payloads):
    return {name: torch.stack([p[name] for p in payloads]).amin(0) for name in payloads[0]}


def sum_of_uploads(payloads):
    return {name: sum(p[name] for p in payloads) for name in payloads[0]}


def last_upload(payloads):
    return {name: value.clone() for name, value in payloads[-1].items()}


def shifted_mean(payloads):
    return {name: value + 1e-3 for name, value in uniform(payloads).items()}


def float64_mean(payloads):
    return {name: value.double() for name, value in uniform(payloads).items()}


def changed_upload(payloads):
    for payload in payloads:
        payload["head"].abs_()
    return uniform(payloads)


def random_mixture(payloads):
    part = torch.rand(())
    return {
        name: part * payloads[0][name] + (1 - part) * value
        for name, value in uniform(payloads).items()
    }


@pytest.mark.parametrize(
    ("merge", "says"),
    [
        (lambda payloads: dict(payloads[0]), "returns .* in the memory of an upload"),
        (
            lambda payloads: {"head": uniform(payloads)["head"]},
            "does not return the parameter prompt",
        ),
        (float64_mean, "turns torch.bfloat16 .* into torch.float64"),
        (sum_of_uploads, "merges head to a value outside the range of the clients"),
        (shifted_mean, "(merges head to a value outside|changes head, on which all clients agree)"),
        (last_upload, "depends on the order of the clients"),
        (changed_upload, "changes an upload in place"),
        (random_mixture, "merges the same uploads to different values"),
    ],
)
def test_broken_aggregator_is_rejected(merge: Callable, says: str) -> None:
    merge.name = "broken"
    with pytest.raises(AssertionError, match=f"broken {says}"):
        check_aggregator(merge)


def test_aggregator_must_reject_too_few_uploads() -> None:
    check_aggregator(minimum)
    with pytest.raises(
        AssertionError, match="median merges 2 uploads; raise FczooError for fewer than 3"
    ):
        check_aggregator("median", fewest=3)
