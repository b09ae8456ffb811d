"""What every aggregator has to keep, and the means."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fczoo import Payload, Tree
from fczoo.aggregators.averaging import fedavg, uniform
from fczoo.core.registry import AGGREGATORS, MERGES
from helpers_aggregators import (
    clients,
    close,
    copy,
    gaussian_rows,
    prompt_pool,
    prototype_rows,
    prototypes,
    random_payloads,
    rng_of,
    same,
    seeds,
    some,
)

MEANS = {"fedavg": fedavg, "uniform": uniform}


# ---------------------------------------------------------------- what every registered aggregator has to keep


OWN: dict[str, Callable[[torch.Generator], Tree]] = {
    "fedavg": lambda rng: {},
    "uniform": lambda rng: {},
    "prototype_reweight": prototypes,
    "gaussian_mixture": gaussian_rows,
    "prototype_pool": prototype_rows,
    "sort_by_usage": prompt_pool,
}
AVERAGE = {"sort_by_usage": "uniform", "uniform": "uniform"}  # the others weight by sample counts
ROBUST = AGGREGATORS.names("fczoo.aggregators.robust")  # which have tests of their own
NAMES = [*(name for name in AGGREGATORS.names() if name not in ROBUST), *MERGES.names()]


def get(name: str) -> Callable:
    return (MERGES if name in MERGES.names() else AGGREGATORS).get(name)


names = pytest.mark.parametrize("name", NAMES)


def test_every_aggregator_has_payloads_here() -> None:
    assert set(NAMES) == OWN.keys()


@names
@some
@given(clients, seeds)
def test_pure(name: str, count: int, seed: int) -> None:
    payloads = random_payloads(count, seed, OWN[name])
    before = copy(payloads)
    first, second = get(name)(payloads), get(name)(payloads)
    assert len(payloads) == count and all(map(same, payloads, before))
    assert same(first, second)
    for part in ("head", "prompt"):
        assert first[part].data_ptr() not in {p[part].data_ptr() for p in payloads}  # no view of an upload


@names
@some
@given(clients, seeds, seeds)
def test_averaged_part(name: str, count: int, seed: int, shuffle: int) -> None:
    """What has no special meaning is averaged, inside the hull of the inputs, whatever the order of the clients."""
    payloads = random_payloads(count, seed, OWN[name])
    n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
    weights = torch.full((count,), 1 / count, dtype=torch.float64) if name in AVERAGE else n / n.sum()
    merged = get(name)(payloads)
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    shuffled = get(name)([payloads[i] for i in order])
    for part in ("head", "prompt"):
        stacked = torch.stack([p[part] for p in payloads])
        assert close(merged[part], torch.einsum("k,k...->...", weights, stacked))
        assert close(merged[part], shuffled[part])
        assert (merged[part] >= stacked.amin(0) - 1e-12).all() and (
            merged[part] <= stacked.amax(0) + 1e-12
        ).all()


@names
@some
@given(clients, seeds)
def test_identical_clients_change_nothing(name: str, count: int, seed: int) -> None:
    one = random_payloads(1, seed, OWN[name])[0]
    merged = get(name)([Payload(one.tensors, k, 3 * k + 1) for k in range(count)])
    assert close(merged["head"], one["head"]) and close(merged["prompt"], one["prompt"])
    if name == "prototype_reweight":
        assert close(merged["prototype"], one["prototype"])


# ---------------------------------------------------------------- means


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_single_client_is_returned(mean: Callable) -> None:
    payload = Payload({"x": torch.tensor([1.5, -2.0])}, 7, 12)
    assert mean([payload])["x"].tolist() == [1.5, -2.0]


def test_two_client_means_by_hand() -> None:
    # n = 1 and 3: weights 1/4 and 3/4. x: 1/4 * 0 + 3/4 * 4 = 3 and 1/4 * 8 + 3/4 * 0 = 2. Plainly: 2 and 4.
    payloads = [
        Payload({"x": torch.tensor([0.0, 8.0])}, 0, 1),
        Payload({"x": torch.tensor([4.0, 0.0])}, 1, 3),
    ]
    assert fedavg(payloads)["x"].tolist() == [3.0, 2.0]
    assert uniform(payloads)["x"].tolist() == [2.0, 4.0]


def test_means_keep_the_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        payloads = [Payload({"x": torch.ones(2, dtype=dtype) * k}, k) for k in range(3)]
        for mean in MEANS.values():
            assert mean(payloads)["x"].dtype == dtype and mean(payloads)["x"].tolist() == [1.0, 1.0]


@some
@given(clients, seeds, st.integers(1, 50))
def test_fedavg_depends_on_shares_only(count: int, seed: int, factor: int) -> None:
    payloads = random_payloads(count, seed)
    scaled = [replace(p, num_samples=p.num_samples * factor) for p in payloads]
    assert close(fedavg(payloads)["head"], fedavg(scaled)["head"])
    equal = [replace(p, num_samples=factor) for p in payloads]
    assert close(fedavg(equal)["head"], uniform(payloads)["head"])


@some
@given(st.integers(2, 6), seeds)
def test_fedavg_of_merged_clients(count: int, seed: int) -> None:
    """Two clients with the same tensor are one client with their samples together."""
    payloads = random_payloads(count, seed)
    twin = [*payloads, replace(payloads[0], client=count)]
    merged = [replace(payloads[0], num_samples=2 * payloads[0].num_samples), *payloads[1:]]
    assert close(fedavg(twin)["head"], fedavg(merged)["head"])
