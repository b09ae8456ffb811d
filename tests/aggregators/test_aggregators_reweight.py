"""Prototype re-weighting: properties over random payloads, and small cases worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Payload
from fczoo.aggregators.averaging import uniform
from fczoo.aggregators.prototypes import prototype_reweight, prototype_weights
from fczoo.testing.federation_parts import random_uploads
from helpers_aggregators import close, normal, prototypes, rng_of, seeds, some


class Case:
    """Random prototypes, class means and a table of the clients that hold each class."""

    def __init__(self, count: int, classes: int, dim: int, seed: int):
        rng = rng_of(seed)
        self.local, self.means = normal(rng, count, classes, dim), normal(rng, count, classes, dim)
        self.present = torch.rand(count, classes, generator=rng) < 0.6

    def weights(self, temperature: float = 0.2, **changes: Tensor) -> Tensor:
        return prototype_weights(
            *(
                {"local": self.local, "means": self.means, "present": self.present} | changes
            ).values(),
            temperature,
        )

    def inverse_distances(self) -> Tensor:
        """Compute p = 1/d in plain loops."""
        count, classes, _ = self.local.shape
        p = torch.empty(count, classes, dtype=torch.float64)
        for k in range(count):
            for c in range(classes):
                d = sum(
                    math.dist(self.local[k, c].tolist(), self.means[i, c].tolist())
                    for i in range(count)
                    if self.present[i, c]
                )
                p[k, c] = 1 / d if d else math.inf
        return p


cases = st.builds(Case, st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), seeds)
taus = st.floats(0.05, 5)


@some
@given(cases, taus)
def test_weights_equal_softmax_of_inverse_distance(case: Case, tau: float) -> None:
    weights, p = case.weights(tau), case.inverse_distances()
    count = len(weights)
    assert (weights >= 0).all()
    assert close(weights.sum(0), torch.ones(weights.shape[1], dtype=torch.float64))
    for c in range(weights.shape[1]):
        if (
            not case.present[:, c].any() or p[:, c].max() - p[:, c].min() <= 1e-12 * p[:, c].max()
        ):  # no client has it, or distances are equal
            assert close(weights[:, c], torch.full((count,), 1 / count, dtype=torch.float64))
            continue
        low, high = (
            1 / (1 + (count - 1) * math.exp(1 / tau)),
            math.exp(1 / tau) / (math.exp(1 / tau) + count - 1),
        )
        assert (weights[:, c] >= low * (1 - 1e-9)).all()
        assert (weights[:, c] <= high * (1 + 1e-9)).all()
        ratios = [(x - p[:, c].min()) / (p[:, c].max() - p[:, c].min()) for x in p[:, c]]
        powers = [math.exp(a / tau) for a in ratios]
        assert close(
            weights[:, c],
            torch.tensor([x / sum(powers) for x in powers], dtype=torch.float64),
            1e-6,
        )
        order = p[:, c].argsort()
        assert (weights[order, c].diff() >= -1e-12).all()  # closer clients weigh more
        assert weights[p[:, c].argmax(), c] >= weights[:, c].max() - 1e-12


@some
@given(cases, st.floats(0.1, 100), seeds)
def test_weights_are_invariant_to_scale_shift_rotation(case: Case, scale: float, seed: int) -> None:
    dim = case.local.shape[-1]
    rng = rng_of(seed)
    turn, shift = torch.linalg.qr(normal(rng, dim, dim)).Q, normal(rng, dim)
    for change in (lambda x: scale * x, lambda x: x + shift, lambda x: x @ turn):
        assert close(
            case.weights(local=change(case.local), means=change(case.means)), case.weights(), 1e-6
        )


@some
@given(cases, seeds)
def test_weights_are_equivariant_to_client_order(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.local), generator=rng_of(seed))
    weights = case.weights(
        local=case.local[order], means=case.means[order], present=case.present[order]
    )
    assert close(weights, case.weights()[order], 1e-6)


@some
@given(cases)
def test_weights_ignore_means_of_clients_without_class(case: Case) -> None:
    noise = torch.where(case.present[..., None], case.means, torch.full_like(case.means, 1e3))
    assert torch.equal(case.weights(means=noise), case.weights())


@some
@given(cases)
def test_weights_at_extreme_temperatures(case: Case) -> None:
    count = len(case.local)
    assert close(case.weights(1e9), torch.full_like(case.weights(), 1 / count), 1e-6)
    sharp, p = case.weights(1e-6), case.inverse_distances()
    for c in range(p.shape[1]):
        second = p[:, c].sort(descending=True).values[1:2]
        if case.present[:, c].any() and count > 1 and second < p[:, c].max() * (1 - 1e-3):
            assert close(
                sharp[:, c], torch.nn.functional.one_hot(p[:, c].argmax(), count).double(), 1e-6
            )


def test_weights_are_uniform_for_equal_distances() -> None:
    """Weight clients equally if their distances are equal.

    Three corners of a cube are seen from its diagonal.
    """
    local = torch.eye(3, dtype=torch.float64)[:, None]
    for present in ([True, False, False], [True, True, True]):
        means = torch.zeros(3, 1, 3, dtype=torch.float64)
        assert (
            prototype_weights(local, means, torch.tensor(present)[:, None])[:, 0].tolist()
            == [1 / 3] * 3
        )


def test_weights_of_one_client_and_of_absent_class() -> None:
    case = Case(1, 2, 3, 0)
    case.present[:] = torch.tensor([True, False])
    assert case.weights().tolist() == [[1.0, 1.0]]
    absent = Case(4, 1, 3, 0)
    absent.present[:] = False
    assert absent.weights()[:, 0].tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_at_distance_zero(dtype: torch.dtype) -> None:
    case = Case(3, 1, 4, 0)
    local, means = case.local.to(dtype), case.means.to(dtype)
    present = torch.tensor([[True], [False], [False]])
    local[2] = means[0]  # exactly on the only mean
    weights = prototype_weights(local, means, present)
    # p is about 1e12 against about 1, so the others rescale to 0:
    # e^5 / (e^5 + 2) = 148.413 / 150.413 = 0.98670
    assert weights.isfinite().all()
    assert weights[2, 0].item() == pytest.approx(0.98670, abs=1e-5)
    assert prototype_weights(means[:1].expand(3, -1, -1), means, present)[
        :, 0
    ].tolist() == pytest.approx([1 / 3] * 3)  # all are on it


def test_weights_of_three_clients_by_hand() -> None:
    # One class, D = 1, held by client 0 alone with mean 0; prototypes at 1, -2 and 4. d = 1, 2, 4;
    # p = 1, 1/2, 1/4; rescaled by (p - 1/4) / (3/4): 1, 1/3, 0. tau = 0.2: e^5 = 148.4132, e^(5/3)
    # = 5.2945, e^0 = 1; sum 154.7077; weights 0.95931, 0.03422, 0.00646.
    local = torch.tensor([[[1.0]], [[-2.0]], [[4.0]]])
    means = torch.tensor([[[0.0]], [[9.0]], [[9.0]]])
    present = torch.tensor([[True], [False], [False]])
    weights = prototype_weights(local, means, present)[:, 0]
    assert weights.tolist() == pytest.approx([0.95931, 0.03422, 0.00646], abs=1e-5)
    # Squared: d = 1, 4, 16; p = 1, 1/4, 1/16; rescaled by (p - 1/16) / (15/16): 1, 1/5, 0;
    # e^5, e^1, e^0; sum 152.1315.
    squared_weights = prototype_weights(local, means, present, squared=True)[:, 0]
    assert squared_weights.tolist() == pytest.approx(
        [148.4132 / 152.1315, 2.7183 / 152.1315, 1 / 152.1315], abs=1e-5
    )


def test_reweight_of_two_clients_by_hand() -> None:
    # D = 2, two classes. Both clients hold class 0, with means (0, 0) and (3, 4); class 1 is held
    # by no one. Client 0 has prototype (0, 4): distances 4 to (0, 0) and 3 to (3, 4), d = 7. Client
    # 1 has prototype (6, 8): distances 10 and 5, d = 15. Rescaled p: 1 and 0. Weights e^5 / (e^5 +
    # 1) = 148.4132 / 149.4132 = 0.993307 and 0.006693. Class 0: 0.993307 (0, 4) + 0.006693 (6, 8) =
    # (0.040158, 4.026772). Class 1: mean of (2, 0) and (4, 2) = (3, 1). The rest is averaged by n =
    # 30 and 10: 3/4 * 4 + 1/4 * 8 = 5.
    def payload(client: int, samples: int, prototype: list, mean: list, lora: float) -> Payload:
        tensors = {
            "prototype": torch.tensor(prototype),
            "class.mean": torch.tensor(mean),
            "lora": torch.tensor([lora]),
        }
        return Payload(
            {**tensors, "class.count": torch.tensor([float(samples), 0.0])}, client, samples
        )

    payloads = [
        payload(0, 30, [[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], 4.0),
        payload(1, 10, [[6.0, 8.0], [4.0, 2.0]], [[3.0, 4.0], [0.0, 0.0]], 8.0),
    ]
    average = prototype_reweight(payloads)
    assert average.keys() == {"prototype", "lora"}
    assert average["prototype"][0].tolist() == pytest.approx([0.040158, 4.026772], abs=1e-5)
    assert average["prototype"][1].tolist() == [3.0, 1.0]
    assert average["lora"].tolist() == [5.0]
    assert prototype_reweight(payloads, uniform)["lora"].tolist() == [6.0]
    # tau = 5: e^0.2 / (e^0.2 + 1) = 1.221403 / 2.221403 = 0.549834
    assert prototype_reweight(payloads, temperature=5.0)["prototype"][0, 0].item() == pytest.approx(
        6 * (1 - 0.549834), abs=1e-5
    )


@some
@given(st.integers(1, 6), seeds, seeds)
def test_reweighted_prototypes_lie_between_client_values(
    count: int, seed: int, shuffle: int
) -> None:
    payloads = random_uploads(count, seed, prototypes)
    average, local = (
        prototype_reweight(payloads)["prototype"],
        torch.stack([p["prototype"] for p in payloads]),
    )
    assert (average >= local.amin(0) - 1e-12).all()
    assert (average <= local.amax(0) + 1e-12).all()
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert close(prototype_reweight([payloads[i] for i in order])["prototype"], average, 1e-6)
