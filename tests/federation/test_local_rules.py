"""``--local``: FedNova and MOON, by hand and in runs."""

import math

import pytest
import torch

from fczoo.core.payload import Payload
from fczoo.core.registry import AGGREGATORS
from fczoo.core.types import whole_batch
from fczoo.federation.local_rules import STEPS, make_local_training
from helpers_engine import run_to_end, same


def test_fednova_by_hand():
    """Compare FedNova's merge with values worked out by hand.

    Clients with 1 and 3 images took 2 and 6 steps: tau_eff = 2 / 4 + 3 * 6 / 4 = 5. Changes 0.4 and
    0.6 count as 5 / 2 * 0.4 = 1 and 5 / 6 * 0.6 = 0.5, on average 1 / 4 + 3 * 0.5 / 4.
    """
    rule, average = make_local_training("fednova"), AGGREGATORS.get("fedavg")

    def uploads(*steps: float) -> list[Payload]:
        trees = [
            {
                "w": torch.tensor([w], dtype=torch.float64),
                STEPS: torch.tensor(s),
                "sum": torch.ones(1),
            }
            for w, s in zip((1.4, 1.6), steps, strict=True)
        ]
        return [Payload(tree, k, n) for k, (tree, n) in enumerate(zip(trees, (1, 3), strict=True))]

    start = {"w": torch.ones(1, dtype=torch.float64)}
    adapted = rule.adapt_uploads(uploads(2.0, 6.0), start, average)
    assert [p["w"].item() for p in adapted] == pytest.approx([2.0, 1.5])
    assert average(adapted)["w"].item() == pytest.approx(1 + 1 / 4 + 3 / 8)
    assert all(p.keys() == {"w", "sum"} and p["sum"] == 1 for p in adapted)
    equal = rule.adapt_uploads(uploads(4.0, 4.0), start, average)
    assert [p["w"].item() for p in equal] == [1.4, 1.6]


def test_fednova_with_equal_steps_matches_plain_run(make_bench, small_method):
    method = small_method("fedavg", tune="head", optimizer="sgd")
    settings = {"batch_size": 100, "rounds": 1}
    plain, ours = (
        run_to_end(make_bench(local=local, **settings), method) for local in (None, "fednova")
    )
    assert same(ours.state, plain.state)
    other = run_to_end(make_bench(local="fednova", batch_size=4, rounds=1), method)
    assert not same(other.state, run_to_end(make_bench(batch_size=4, rounds=1), method).state)


def test_moon_loss_by_hand():
    """Compare MOON's term with values worked out by hand.

    Features (1, 0), (1, 1) and padding; the global model's are (1, 0), the previous ones (0, 1), at
    temperature 0.5: log(1 + e^-2) and log 2, on average over two images, times 3.
    """
    rule = make_local_training("moon:3,temperature=0.5")
    now = torch.tensor([[1.0, 0.0], [1.0, 1.0], [5.0, 2.0]])
    before, sent = torch.tensor([[0.0, 1.0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    batch = whole_batch(torch.empty(3, 0), torch.zeros(3, dtype=torch.int64))
    batch = batch._replace(w=torch.tensor([1.0, 1.0, 0.0]))

    def features(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors.get("z", sent)

    term = rule.loss_term(features, {"z": now}, {"z": before}, batch)
    assert term.item() == pytest.approx(3 * (math.log(1 + math.exp(-2)) + math.log(2)) / 2)


@pytest.mark.parametrize("together", [1, 3])
def test_moon_starts_in_second_round_of_client(make_bench, small_method, together):
    method = small_method("fedavg", tune="full", optimizer="sgd", lr_backbone=0.1)
    runs = [
        run_to_end(make_bench(local=local, together=together, tasks=1, epochs=1, rounds=n), method)
        for local in (None, "moon:5")
        for n in (1, 2)
    ]
    first, second, ours_first, ours_second = (run.state for run in runs)
    assert same(ours_first, first, 1e-12) and not same(ours_second, second, 1e-6)
    assert not runs[-1].result.rejected and runs[-1].server.controls.clients
