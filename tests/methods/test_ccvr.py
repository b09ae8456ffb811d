"""CCVR: pooled moments of all clients, draws from them, the calibrated head."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import Context, FczooError, Task, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from fczoo.core.tree import select
from fczoo.functional.gaussians import (
    draw_features,
    factorise,
    gaussians,
    moment_sums,
    pool_gaussians,
)
from helpers_methods import CLOSE, DIM, batch
from helpers_payload import server_context

EACH_ROUND = {
    **{"gaussian": "mixture", "calibrate": "each_round"},
    **{"calibrated": "current", "covariance": "diagonal"},
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_pooled_moments_match_concatenated_features(labels, full, seed):
    rng, task = torch.Generator().manual_seed(seed), Task(0, 0, 3, 3, 1)
    data = [
        (5 + torch.randn(len(y), 4, generator=rng, dtype=torch.float64), torch.tensor(y))
        for y in labels
    ]
    rows = [gaussians(moment_sums(x, batch(x, y), task, full), 0, single=True) for x, y in data]
    for (_, y), row in zip(
        data, rows, strict=True
    ):  # the identity needs variance 0 for a single image
        name = "gauss.cov" if full else "gauss.var"
        single = torch.bincount(y, minlength=3)[row["gauss.label"]] == 1
        row[name] = torch.where(single.view(-1, *[1] * (row[name].dim() - 1)), 0.0, row[name])
    moments = pool_gaussians({k: torch.cat([r[k] for r in rows]) for k in rows[0]})
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    for i, c in enumerate(moments["gauss.label"].tolist()):
        class_features = x[y == c]
        assert int(moments["gauss.count"][i]) == len(class_features)
        torch.testing.assert_close(moments["gauss.mean"][i], class_features.mean(0), **CLOSE)
        if len(class_features) > 1:
            spread = class_features.T.cov() if full else class_features.var(0)
            torch.testing.assert_close(
                moments["gauss.cov" if full else "gauss.var"][i], spread, rtol=1e-7, atol=1e-7
            )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 300), st.floats(1.0, 600.0), st.booleans(), st.integers(0, 10**6))
def test_float32_moments_keep_small_variance_at_large_mean(n, ratio, full, seed):
    """Compare moments in single precision with those in double precision.

    The mean is ``ratio`` times the standard deviation. Features come in several batches, as in a
    pass over a client's images.
    """
    rng, task = torch.Generator().manual_seed(seed), Task(0, 0, 1, 1, 1)
    features = (ratio + torch.randn(n, 3, generator=rng)).float()
    parts = [
        moment_sums(x, batch(x, torch.zeros(len(x), dtype=torch.int64)), task, full)
        for x in features.split(64)
    ]
    moments = gaussians({k: sum(part[k] for part in parts) for k in parts[0]}, 0, single=False)
    assert {v.dtype for k, v in moments.items() if k != "gauss.label"} == {torch.float32}
    exact = features.double().T.cov() if full else features.double().var(0)
    error = torch.linalg.vector_norm(
        moments["gauss.cov" if full else "gauss.var"][0].double() - exact
    )
    assert error < 1e-4 * torch.linalg.vector_norm(exact)
    torch.testing.assert_close(moments["gauss.mean"][0], features.double().mean(0).float())


def test_pooled_moments_by_hand():
    """Compare pooled moments with values worked out by hand.

    Client 1: {0, 2}, mean 1, variance 2. Client 2: {5, 7, 9}, mean 7, variance 4. All: 4.6 and
    13.3.
    """
    gauss = {
        "gauss.label": torch.tensor([3, 3]),
        "gauss.client": torch.tensor([0, 1]),
        "gauss.count": torch.tensor([2.0, 3.0]),
        "gauss.mean": torch.tensor([[1.0], [7.0]]),
        "gauss.var": torch.tensor([[2.0], [4.0]]),
    }
    moments = pool_gaussians(gauss)
    assert moments["gauss.label"].tolist() == [3]
    assert moments["gauss.count"].tolist() == [5]
    assert float(moments["gauss.mean"]) == pytest.approx(4.6)
    assert float(moments["gauss.var"]) == pytest.approx(13.3)


def test_draws_match_full_covariance(rng):
    cov = torch.tensor([[4.0, 3.0], [3.0, 4.0]], dtype=torch.float64)
    gauss = {
        "gauss.label": torch.tensor([1]),
        "gauss.count": torch.tensor([5.0], dtype=torch.float64),
        "gauss.mean": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        "gauss.cov": cov[None],
    }
    x, y = draw_features(factorise(gauss), 100_000, rng)
    assert set(y.tolist()) == {1}
    np.testing.assert_allclose(x.mean(0), [1, -1], atol=0.03)
    np.testing.assert_allclose(x.T.cov(), cov, atol=0.1)


def test_covariance_factors_by_hand():
    """Compare factors with values worked out by hand.

    [[4, 2], [2, 5]] = A A^T with A = [[2, 0], [1, 2]]. [[1, 2], [2, 1]] has the eigenvalues 3 and
    -1. Only 3 remains, with the direction (1, 1): all entries of A A^T are 1.5.
    """
    cov = torch.tensor([[[4.0, 2.0], [2.0, 5.0]], [[1.0, 2.0], [2.0, 1.0]]], dtype=torch.float64)
    roots = factorise({"gauss.mean": torch.zeros(2, 2).double(), "gauss.cov": cov})["gauss.root"]
    torch.testing.assert_close(
        roots[0], torch.tensor([[2.0, 0.0], [1.0, 2.0]]).double(), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(
        roots[1] @ roots[1].mT, torch.full((2, 2), 1.5).double(), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("gaussian", ["mixture", "pooled"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_ccvr_server_keeps_backbone_and_old_head_rows(
    make_bench, small_method, watch, gaussian, covariance
):
    options = {**EACH_ROUND, "gaussian": gaussian, "covariance": covariance}
    run = watch(make_bench(), small_method("ccvr", **options))
    for previous, call in zip(run.rounds, run.rounds[1:], strict=False):
        if call.ctx.round == 0:
            continue
        plain = fedavg([p.drop("gauss.") for p in previous.payloads])
        for name, value in select(plain, "full.").items():
            assert torch.equal(call.state[name], value)
        first = call.ctx.task.start
        assert torch.equal(call.state["head.weight"][:first], plain["head.weight"][:first])
        assert not torch.equal(
            call.state["head.weight"][first : call.ctx.task.stop],
            plain["head.weight"][first : call.ctx.task.stop],
        )


def test_ccvr_keeps_head_with_one_image_per_class(small_method, backbone, tasks, rng):
    method = small_method("ccvr", **EACH_ROUND)
    state = method.begin_task({}, tasks[0], backbone, rng)
    sums = {
        "class.count": torch.ones(3),
        "class.sum": torch.ones(3, DIM),
        "class.squares": torch.ones(3, DIM),
    }
    ctx = Context(tasks[0], 0, 1, {})
    payload = Payload(method.make_upload(select(state, *method.training().optims), sums, ctx), 0, 3)
    new_state = method.server_update(
        state, method.aggregate([payload], fedavg), server_context(tasks[0], backbone, rng)
    )
    assert all(torch.equal(new_state[k], state[k]) for k in state)


@pytest.mark.parametrize("name", ["ccvr", "fedproto"])
def test_statistics_of_unnormalised_images_differ(record, batch_of, name):
    run = record(name)
    call = run.rounds[0]
    data = batch_of(run.method, run.bench.train, call.clients[0].index)
    train = select(call.state, *run.method.training().optims)
    quirk = create_method(name, **{**vars(run.method), "stats_unnormalised": True})
    right, wrong = (
        m.collect("after_training", run.bench.backbone, train, data, call.ctx)["class.sum"]
        for m in (run.method, quirk)
    )
    assert (right - wrong).abs().max() > 1e-3
    config = run.bench.backbone.config
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (config.mean, config.std)
    )
    by_hand = run.method.collect(
        "after_training", run.bench.backbone, train, data._replace(x=data.x * std + mean), call.ctx
    )["class.sum"]
    torch.testing.assert_close(wrong, by_hand, **CLOSE)
    raw = data.x * std + mean
    assert raw.min() > -1e-9 and raw.max() < 1 + 1e-9
    with pytest.raises(
        FczooError,
        match=f"{name}.stats_unnormalised reads images again, but {name}.tune=head stores only",
    ):
        create_method(name, stats_unnormalised=True, tune="head")


def test_pooled_moments_count_clients_with_one_image(make_bench, small_method, watch):
    """Count a client with one image in pooled moments, but not in the mixture.

    In task 3 client 1 has a single image. The formula includes its n_k mu_k.
    """
    run, mixture = (
        watch(make_bench(), small_method("ccvr", **{**EACH_ROUND, "gaussian": gaussian}))
        for gaussian in ("pooled", "mixture")
    )
    call = run.rounds[-1]
    (payload,) = [p for p in call.payloads if p.client == 1]
    assert payload["gauss.count"].tolist() == [1]
    counts = torch.bincount(
        run.bench.train.labels[torch.cat([c.index for c in call.clients])], minlength=7
    )
    moments = pool_gaussians(select(run.states[2], "gauss."))
    assert moments["gauss.count"].tolist() == counts[5:].tolist()
    (left_out,) = [p for p in mixture.rounds[-1].payloads if p.client == 1]
    assert not len(left_out["gauss.label"])


@pytest.mark.parametrize("full", [False, True])
def test_single_calibration_uses_final_global_model(
    make_bench, small_method, watch, batch_of, full
):
    run = watch(make_bench(), small_method("ccvr", covariance="full" if full else "diagonal"))
    plain = watch(make_bench(), small_method("fedavg"))
    ends = [c for c in run.calls if c.phase == "task_end"]
    assert len(ends) == 3
    assert all(not select(p, "gauss.") for c in run.rounds for p in c.payloads)
    for name, value in select(plain.states[0], "head.", "full.").items():
        assert torch.equal(ends[0].state[name], value)  # the rounds equal FedAvg
    assert not torch.equal(run.states[0]["head.weight"], ends[0].state["head.weight"])
    data = batch_of(run.method, run.bench.train, torch.arange(len(run.bench.train.labels)))
    features = run.method.features(run.bench.backbone, ends[2].state, data)
    gauss = select(run.states[2], "gauss.")
    assert gauss["gauss.label"].tolist() == list(range(7))
    assert set(gauss["gauss.client"].tolist()) == {-1}
    class_features = features[data.y == 6]
    torch.testing.assert_close(gauss["gauss.mean"][6], class_features.mean(0), **CLOSE)
    spread = class_features.T.cov() if full else class_features.var(0)
    torch.testing.assert_close(
        gauss["gauss.cov" if full else "gauss.var"][6], spread, rtol=1e-7, atol=1e-7
    )
