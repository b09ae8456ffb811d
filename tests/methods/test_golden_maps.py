"""Outputs of the official PODNet and AFC, reproduced (tests/methods/golden/README.md)."""

import math

import pytest
import torch

from fczoo import Context, Task, create_method
from fczoo.baselines._proxy_head import imprint_proxies, nca, proxy_logits
from fczoo.functional.feature_maps import channel_distance, spatial_distance
from helpers_golden import golden
from helpers_methods import CLOSE, batch

EXACT = {"rtol": 1e-9, "atol": 1e-12}
R = math.sqrt(2)  # two of four classes are new


def maps(g) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    new = [g[f"in.new{i}"].clone().requires_grad_() for i in range(3)]
    return [g[f"in.old{i}"] for i in range(3)], new


def model(g) -> dict[str, torch.Tensor]:
    proxies = g["in.proxies"].unflatten(0, (4, 10))
    return {
        "proxy.old": proxies[:2],
        "proxy.new": proxies[2:],
        "eta": g["in.scale"].clone().requires_grad_(),
    }


def classification(method, g) -> torch.Tensor:
    data = batch(g["in.f_new"], g["in.labels"])
    return data.mean(method.nca(g["in.f_new"], model(g), data))


def test_podnet_loss() -> None:
    g = golden("podnet_total")
    method, (old, new) = create_method("podnet"), maps(g)
    ctx = Context(Task(1, 2, 4, 4, 2), 0, 1, {})
    pool_loss = R * method.distance(old, new, ctx).mean()
    torch.testing.assert_close(pool_loss, g["out.pod_weighted"], **EXACT)
    for i, gradient in enumerate(torch.autograd.grad(pool_loss, new)):
        torch.testing.assert_close(gradient, g[f"out.grad_map{i}"], **EXACT)
    flat = R * method.flat(g["in.f_old"], g["in.f_new"]).mean()
    torch.testing.assert_close(flat, g["out.flat_weighted"], **EXACT)
    paper, code = (
        classification(method, g),
        classification(create_method("podnet", nca_code=True), g),
    )
    torch.testing.assert_close(paper, g["alt.nca_paper"], **EXACT)
    torch.testing.assert_close(code, g["quirk.nca"], **EXACT)
    torch.testing.assert_close(paper + pool_loss + flat, g["alt.total_paper_nca"], **EXACT)
    torch.testing.assert_close(code + pool_loss + flat, g["quirk.total"], **EXACT)


def test_podnet_gradients_match_released_code() -> None:
    g, method = golden("podnet_total"), create_method("podnet", nca_code=True)
    features, tree = g["in.f_new"].clone().requires_grad_(), model(g)
    data = batch(features, g["in.labels"])
    loss = (
        data.mean(method.nca(features, tree, data))
        + R * method.flat(g["in.f_old"], features).mean()
    )
    gradients = torch.autograd.grad(loss, [features, tree["eta"]])
    torch.testing.assert_close(gradients[0], g["quirk.grad_features"], **EXACT)
    torch.testing.assert_close(gradients[1], g["quirk.grad_scale"], **EXACT)


def test_afc_loss() -> None:
    g = golden("afc_loss")
    old, new = maps(g)
    importance = [g[f"in.importance{i}"] for i in range(3)]
    pairs = list(zip(old, new, strict=True))
    each = [channel_distance(*pair, weight) for pair, weight in zip(pairs, importance, strict=True)]
    loss = torch.stack(each).mean()
    torch.testing.assert_close(loss, g["out.loss"], **EXACT)
    for i, gradient in enumerate(torch.autograd.grad(loss, new)):
        torch.testing.assert_close(gradient, g[f"out.grad{i}"], **EXACT)
    plain = torch.stack([channel_distance(*pair, torch.ones(())) for pair in pairs]).mean()
    torch.testing.assert_close(plain, g["out.loss_unit_importance"], **EXACT)
    method = create_method("afc")
    distillation = R * method.strength * loss
    torch.testing.assert_close(distillation, g["out.distil_weighted"], **EXACT)
    paper, code = classification(method, g), classification(create_method("afc", nca_code=True), g)
    torch.testing.assert_close(paper + distillation, g["alt.total_paper_nca"], **EXACT)
    torch.testing.assert_close(code, g["quirk.nca"], **EXACT)
    torch.testing.assert_close(code + distillation, g["quirk.total"], **EXACT)


def test_distances_of_maps_by_hand() -> None:
    """Compare distances of maps with values worked out by hand.

    One channel of 2 x 2, moved from one corner to the other: sqrt 2; unchanged by scale and sign.
    """
    old = torch.tensor([[[[1.0, 0], [0, 0]]]], dtype=torch.float64)
    new = torch.tensor([[[[0.0, 0], [0, 1]]]], dtype=torch.float64)
    for distance in (spatial_distance, lambda a, b: channel_distance(a, b, torch.ones(1))):
        assert float(distance(old, new)) == pytest.approx(R)
        assert float(distance(old, -3 * old)) == 0
    assert float(channel_distance(old, new, torch.tensor([2.0]))) == pytest.approx(2 * R)
    same = old.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(spatial_distance(old, same * (1 + 1e-15)).sum(), same)
    assert not gradient.any()  # rounding errors give no gradient


def test_nca_by_hand() -> None:
    """Compare the NCA loss with values worked out by hand.

    Two classes, eta 1. For a correct answer with a margin above 0.6 the released code gives .3133
    and the paper 0.
    """
    eta = torch.ones((), dtype=torch.float64)
    for row, paper, code in (([-1.0, -2.0], 0.0, 0.3132617), ([-2.0, -1.0], 1.6, 1.6931472)):
        logits, truth = torch.tensor([row], dtype=torch.float64), torch.tensor([0])
        assert float(nca(logits, truth, eta, 0.6)) == pytest.approx(paper)
        assert float(nca(logits, truth, eta, 0.6, as_released=True)) == pytest.approx(code)
    single = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    loss = nca(single, torch.tensor([0]), eta, 0.6)
    assert not loss.any() and not torch.autograd.grad(loss.sum(), single)[0].any()


def test_proxy_scores_by_hand() -> None:
    """Compare scores of proxies with values worked out by hand.

    On one of two orthogonal proxies: -2 e^-2 / (1 + e^-2); with one proxy 2 cos - 2.
    """
    axes = torch.eye(2, dtype=torch.float64)
    score = -2 * math.exp(-2) / (1 + math.exp(-2))
    assert float(proxy_logits(5 * axes[:1], axes[None])) == pytest.approx(score)
    assert float(proxy_logits(axes[:1] + axes[1:], axes[None, :1])) == pytest.approx(R - 2)


def test_proxies_are_drawn_around_class_mean() -> None:
    """Draw proxies around their class's mean.

    Without variance all proxies are the unit mean, scaled to their old norm. A class without images
    keeps its proxies.
    """
    state = {"proxy.new": torch.full((2, 3, 2), 2.0)}
    count, mean = torch.tensor([4.0, 0.0]), torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    sums = {"class.count": count, "class.sum": 4 * mean, "class.squares": 4 * mean.square()}
    proxies = imprint_proxies(state, sums, torch.Generator().manual_seed(0))["proxy.new"]
    torch.testing.assert_close(
        proxies[0], math.sqrt(8) * mean[:1].expand(3, 2), rtol=1e-3, atol=1e-3
    )
    assert torch.equal(proxies[1], state["proxy.new"][1])
    sums["class.squares"] = sums["class.squares"] + 4
    spread = imprint_proxies(state, sums, torch.Generator().manual_seed(0))["proxy.new"][0]
    assert not torch.allclose(spread[0], spread[1])


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_old_proxies_train_in_balanced_round_only(record, name) -> None:
    run = record(name)
    for call in run.rounds:
        for payload in call.payloads:
            assert ("proxy.old" in payload) == (call.phase == "balanced")
            assert ("eta" in payload) == (call.phase == "train")
    last_rounds = [call for call in run.calls if call.phase == "balanced"]
    assert [call.ctx.task.index for call in last_rounds] == [1, 2]
    for call in last_rounds:
        end_state = run.states[call.ctx.task.index]
        assert not torch.equal(end_state["proxy.old"], call.state["proxy.old"])
        assert torch.equal(end_state["eta"], call.state["eta"])


def test_afc_importance_equals_centralised_importance(record, batch_of) -> None:
    """Compare the sum over clients with the importance of all images; its mean per block is 1."""
    run = record("afc")
    call = [c for c in run.calls if c.phase == "task_end"][1]
    index = torch.cat([c.index for c in call.clients])
    data = batch_of(run.method, run.bench.train, index)
    ends = run.method.collect("task_end", run.bench.backbone, call.state, data, call.ctx)
    total = ends["importance"]
    sums = sum(p["importance"] for p in call.payloads)
    torch.testing.assert_close(total, sums, **CLOSE)
    normal = run.states[1]["importance"]
    torch.testing.assert_close(normal.mean(1), torch.ones(len(normal), dtype=normal.dtype))
    torch.testing.assert_close(normal, total / total.mean(1, keepdim=True))
    none = {"importance": torch.zeros_like(total)}
    assert (run.method.update_from("task_end", call.state, none, None)["importance"] == 1).all()
