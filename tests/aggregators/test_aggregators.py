"""The rules of every aggregator, and the means."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fczoo import Payload, Tree
from fczoo.aggregators.averaging import CappedMean, fedavg, uniform
from fczoo.core.registry import AGGREGATORS, MERGES
from fczoo.testing import check_aggregator
from fczoo.testing.federation_parts import random_uploads
from helpers_aggregators import (
    clients,
    close,
    gaussian_rows,
    prompt_pool,
    prototype_rows,
    prototypes,
    seeds,
    some,
)

MEANS = {"fedavg": fedavg, "uniform": uniform}


# ---------------------------------------------------------------- rules of every aggregator


UPLOAD_PARTS: dict[str, Callable[[torch.Generator], Tree]] = {
    "fedavg": lambda rng: {},
    "uniform": lambda rng: {},
    "prototype_reweight": prototypes,
    "gaussian_mixture": gaussian_rows,
    "prototype_pool": prototype_rows,
    "sort_by_usage": prompt_pool,
}
AVERAGE = {"sort_by_usage": "uniform", "uniform": "uniform"}  # the others weight by sample counts
ROBUST = [*AGGREGATORS.names("fczoo.aggregators.robust"), "capped"]  # which have their own tests
NAMES = [*(name for name in AGGREGATORS.names() if name not in ROBUST), *MERGES.names()]


def get(name: str) -> Callable:
    return (MERGES if name in MERGES.names() else AGGREGATORS).get(name)


names = pytest.mark.parametrize("name", NAMES)


def test_every_aggregator_has_test_uploads() -> None:
    assert set(NAMES) == UPLOAD_PARTS.keys()


@names
def test_every_aggregator_passes_check(name: str) -> None:
    check_aggregator(name if name in AGGREGATORS.names() else MERGES.get(name), UPLOAD_PARTS[name])


@names
@some
@given(clients, seeds)
def test_other_tensors_are_averaged(name: str, count: int, seed: int) -> None:
    """Average tensors without a special meaning, weighted or uniformly."""
    payloads = random_uploads(count, seed, UPLOAD_PARTS[name])
    n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
    weights = (
        torch.full((count,), 1 / count, dtype=torch.float64) if name in AVERAGE else n / n.sum()
    )
    average = get(name)(payloads)
    for part in ("head", "prompt"):
        stack = torch.stack([p[part] for p in payloads])
        assert close(average[part], torch.einsum("k,k...->...", weights, stack))


@some
@given(clients, seeds)
def test_equal_prototypes_stay_unchanged(count: int, seed: int) -> None:
    one = random_uploads(1, seed, prototypes)[0]
    average = get("prototype_reweight")([Payload(one.tensors, k, 3 * k + 1) for k in range(count)])
    assert close(average["prototype"], one["prototype"])


# ---------------------------------------------------------------- means


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_mean_of_one_client_equals_its_upload(mean: Callable) -> None:
    payload = Payload({"x": torch.tensor([1.5, -2.0])}, 7, 12)
    assert mean([payload])["x"].tolist() == [1.5, -2.0]


def test_means_of_two_clients_by_hand() -> None:
    # n = 1 and 3: weights 1/4 and 3/4. x: 1/4 * 0 + 3/4 * 4 = 3 and 1/4 * 8 + 3/4 * 0 = 2. Plainly:
    # 2 and 4.
    payloads = [
        Payload({"x": torch.tensor([0.0, 8.0])}, 0, 1),
        Payload({"x": torch.tensor([4.0, 0.0])}, 1, 3),
    ]
    assert fedavg(payloads)["x"].tolist() == [3.0, 2.0]
    assert uniform(payloads)["x"].tolist() == [2.0, 4.0]


def test_capped_mean_limits_client_weight():
    """Limit a client's weight to a multiple of the median count.

    Counts 1, 2 and 2**62 with a cap of twice the median, 2: weights 1/7, 2/7 and 4/7.
    """
    counts, values = (1, 2, 2**62), (0.0, 7.0, 14.0)
    pairs = zip(values, counts, strict=True)
    payloads = [Payload({"x": torch.tensor([v])}, k, n) for k, (v, n) in enumerate(pairs)]
    assert CappedMean(2.0)(payloads)["x"].tolist() == [pytest.approx(10.0)]
    check_aggregator("capped")
    assert CappedMean(1e18)(payloads[:2])["x"].tolist() == [pytest.approx(14 / 3)]
    assert close(CappedMean(1e18)(payloads[:2])["x"], fedavg(payloads[:2])["x"])


def test_means_keep_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        payloads = [Payload({"x": torch.ones(2, dtype=dtype) * k}, k) for k in range(3)]
        for mean in MEANS.values():
            assert mean(payloads)["x"].dtype == dtype
            assert mean(payloads)["x"].tolist() == [1.0, 1.0]


@some
@given(clients, seeds, st.integers(1, 50))
def test_fedavg_depends_only_on_sample_shares(count: int, seed: int, factor: int) -> None:
    payloads = random_uploads(count, seed)
    scaled_payloads = [replace(p, num_samples=p.num_samples * factor) for p in payloads]
    assert close(fedavg(payloads)["head"], fedavg(scaled_payloads)["head"])
    equal = [replace(p, num_samples=factor) for p in payloads]
    assert close(fedavg(equal)["head"], uniform(payloads)["head"])


@some
@given(st.integers(2, 6), seeds)
def test_fedavg_merges_clients_with_equal_tensors(count: int, seed: int) -> None:
    """Treat two clients with the same tensor as one client that has the samples of both."""
    payloads = random_uploads(count, seed)
    twin = [*payloads, replace(payloads[0], client=count)]
    merged_payloads = [replace(payloads[0], num_samples=2 * payloads[0].num_samples), *payloads[1:]]
    assert close(fedavg(twin)["head"], fedavg(merged_payloads)["head"])
