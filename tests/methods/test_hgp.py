"""HGP: Gaussians of the clients, the rebalanced head, prefixes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import Context, Task, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from fczoo.core.tree import drop, select
from fczoo.functional.gaussians import draw_features
from fczoo.functional.losses import normalised_cross_entropy
from helpers_methods import DIM
from helpers_payload import server_context


def mixture(
    labels: list[int], counts: list[float], means: list, variances: list
) -> dict[str, Tensor]:
    return {
        "gauss.label": torch.tensor(labels),
        "gauss.client": torch.arange(len(labels)),
        "gauss.count": torch.tensor(counts, dtype=torch.float64),
        "gauss.mean": torch.tensor(means, dtype=torch.float64),
        "gauss.var": torch.tensor(variances, dtype=torch.float64),
    }


def test_hgp_draws_client_means_with_zero_spread(rng):
    gauss = mixture(
        [0, 0, 2, 2],
        [3, 1, 4, 0],
        [[1.0, 1.0], [2.0, -2.0], [7.0, 0.0], [99.0, 99.0]],
        [[5.0, 5.0]] * 4,
    )
    x, y = draw_features(gauss, 800, rng, spread=0.0)
    assert len(x) == len(y) == 800
    draws = {(label, *row) for label, row in zip(y.tolist(), x.tolist(), strict=True)}
    assert draws == {
        (0, 1.0, 1.0),
        (0, 2.0, -2.0),
        (2, 7.0, 0.0),
    }  # neither the client without images nor class 1


@pytest.mark.parametrize(("by_count", "share"), [(False, 0.5), (True, 4 / 24)])
def test_hgp_draws_classes_evenly_or_by_count(rng, by_count, share):
    gauss = mixture([0, 0, 2], [3, 1, 20], [[0.0], [1.0], [2.0]], [[1.0]] * 3)
    x, y = draw_features(gauss, 10_000, rng, spread=0.0, by_count=by_count)
    assert (y == 0).double().mean() == pytest.approx(share, abs=0.02)  # four standard deviations
    assert (x[y == 0] == 0).double().mean() == pytest.approx(0.75, abs=0.04)


def test_hgp_draws_follow_law_of_total_variance(rng):
    """Compare moments of draws with the formulas.

    Class mean: sum pi mu. Variance: spread * sum pi var + sum pi (mu - mean)^2. pi = 3/4, 1/4.
    """
    gauss = mixture([1, 1], [3, 1], [[0.0, 4.0], [8.0, 4.0]], [[1.0, 2.0], [5.0, 0.0]])
    x, y = draw_features(gauss, 200_000, rng, spread=3.0)
    assert set(y.tolist()) == {1}
    np.testing.assert_allclose(x.mean(0), [2.0, 4.0], atol=0.05)
    within, between = (
        np.array([0.75 * 1 + 0.25 * 5, 0.75 * 2]),
        np.array([0.75 * 4 + 0.25 * 36, 0.0]),
    )
    np.testing.assert_allclose(x.var(0), 3 * within + between, rtol=0.02)


def test_hgp_treats_clients_with_equal_statistics_as_one(rng):
    """Draw from shares 1 : 2 + 3 of class 0 as from 1 : 5."""
    split = mixture([0, 0, 0], [5, 10, 15], [[0.0], [1.0], [1.0]], [[1.0], [2.0], [2.0]])
    joint = mixture([0, 0], [5, 25], [[0.0], [1.0]], [[1.0], [2.0]])
    for gauss in (split, joint):
        x, _ = draw_features(gauss, 100_000, rng, spread=3.0)
        assert float(x.mean()) == pytest.approx(5 / 6, abs=0.03)
        assert float(x.var()) == pytest.approx(3 * (1 / 6 + 2 * 5 / 6) + 1 / 6 * 5 / 6, rel=0.03)


def test_hgp_statistics_by_hand():
    """Compare statistics with values worked out by hand.

    Class 5 has values 1, 3, 5: mean 3, variance 4. Class 6 has none. Class 7 has one value, and the
    variance of class 5.
    """
    count, total, squares = [3.0, 0.0, 1.0], [[9.0], [0.0], [7.0]], [[35.0], [0.0], [49.0]]
    sums = {
        "class.count": torch.tensor(count),
        "class.sum": torch.tensor(total),
        "class.squares": torch.tensor(squares),
    }
    upload = create_method("hgp").make_upload({}, sums, Context(Task(1, 5, 8, 8, 2), 0, 1, {}))
    assert upload["gauss.label"].tolist() == [5, 7]
    assert upload["gauss.count"].tolist() == [3, 1]
    assert upload["gauss.mean"].tolist() == [[3.0], [7.0]]
    assert upload["gauss.var"].tolist() == [[4.0], [4.0]]
    single = create_method("hgp").make_upload(
        {}, {k: v[2:] for k, v in sums.items()}, Context(Task(1, 7, 8, 8, 2), 0, 1, {})
    )
    assert single["gauss.label"].tolist() == [7]
    assert single["gauss.var"].tolist() == [[0.0]]


def test_hgp_keeps_class_with_one_image_at_client(record):
    """Check client 1, which has a single image in the third task."""
    run = record("hgp")
    (payload,) = [p for p in run.rounds[-1].payloads if p.client == 1]
    assert payload.num_samples == 1 and payload["gauss.count"].tolist() == [1]
    state = run.states[2]
    row = (state["gauss.client"] == 1) & (state["gauss.label"] == payload["gauss.label"])
    assert row.sum() == 1
    assert torch.equal(state["gauss.mean"][row], payload["gauss.mean"])


def test_hgp_keeps_gaussians_of_finished_tasks(record):
    run = record("hgp")
    for earlier, later, stop in ((0, 1, 3), (1, 2, 5)):
        old, new = run.states[earlier], run.states[later]
        old_rows = new["gauss.label"] < stop
        for key in ("gauss.label", "gauss.client", "gauss.count", "gauss.mean", "gauss.var"):
            assert torch.equal(new[key][old_rows], old[key])
        assert (~old_rows).any()
    assert sorted(set(run.states[2]["gauss.label"].tolist())) == list(range(7))


@pytest.mark.parametrize(
    ("window", "moved"), [("all", range(5)), ("current", (3, 4)), ("old", (0, 1, 2)), ("none", ())]
)
def test_hgp_rebalance_moves_only_head_rows_of_its_window(
    record, rng, tasks, backbone, window, moved
):
    run = record("hgp")
    state = run.states[1]
    rows = {k: v[:0] for k, v in drop(select(state, "gauss."), "gauss.client").items()}
    payload = Payload({**select(state, "prefix.", "head."), **rows})
    method = create_method("hgp", rebalance=window, server_epochs=2, per_class=8)
    new_state = method.server_update(
        state, method.aggregate([payload], fedavg), server_context(tasks[1], backbone, rng)
    )
    for name, value in select(state, "prefix.", "gauss.").items():
        assert torch.equal(new_state[name], value)
    changes = [
        c for c in range(7) if not torch.equal(new_state["head.weight"][c], state["head.weight"][c])
    ]
    assert changes == list(moved)
    assert [c for c in range(7) if new_state["head.bias"][c] != state["head.bias"][c]] == list(
        moved
    )


@pytest.mark.parametrize("norm", [0.1, None])
def test_hgp_rebalance_loss_by_hand(norm):
    """Compare the loss with a value worked out by hand.

    Logits (3, 4) of norm 5 become (6, 8) at temperature 0.1, and do not change without it.
    """
    loss = normalised_cross_entropy(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), norm)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(2.0 if norm else 1.0)), rel=1e-5)


@pytest.mark.parametrize("init", ["zeros", "normal", "uniform"])
def test_hgp_rows_of_zero_initialised_prefix_stay_equal(make_bench, small_method, watch, init):
    run = watch(make_bench(rounds=1), small_method("hgp", init=init, blocks=(0, 3)))
    for name, rows in select(run.states[2], "prefix.").items():
        largest_gap = (rows - rows[:1]).abs().max()
        assert largest_gap < 1e-12 if init == "zeros" else largest_gap > 1e-2, name
        assert not torch.equal(rows, run.rounds[0].state[name]), f"{name} was not trained"


@pytest.mark.parametrize(("init", "bound"), [("uniform", DIM**-0.5), ("zeros", 0.0)])
def test_hgp_initial_prefix_bounds(backbone, tasks, rng, init, bound):
    prefixes = select(
        create_method("hgp", init=init).begin_task({}, tasks[0], backbone, rng), "prefix."
    )
    assert len(prefixes) == 10 and all(v.shape == (100, DIM) for v in prefixes.values())
    assert all(0.98 * bound <= v.abs().max() <= bound for v in prefixes.values())


@pytest.mark.parametrize(("draw", "times"), [("epoch", 4), ("round", 1)])
def test_hgp_draws_features_per_epoch_or_per_round(record, rng, tasks, monkeypatch, draw, times):
    run, calls = record("hgp"), []

    def count_draws(*arguments):
        calls.append(1)
        return draw_features(*arguments)

    monkeypatch.setattr("fczoo.functional.calibration.draw_features", count_draws)
    method = create_method("hgp", draw=draw, server_epochs=4, per_class=8)
    method._rebalance(run.states[1], tasks[1], rng)
    assert len(calls) == times
