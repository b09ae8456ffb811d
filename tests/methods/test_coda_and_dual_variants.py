"""Fed-CPrompt and PIP: their additions to CODA-Prompt and DualPrompt."""

import math

import pytest
import torch

from fczoo import Context, Task, create_method
from fczoo.core.payload import Payload
from helpers_golden import golden
from helpers_methods import CLOSE, DIM, batch
from helpers_payload import server_context

# --- Fed-CPrompt


@pytest.mark.parametrize("tag", ["active", "zero", "first"])
def test_fedcprompt_contrast_matches_released_code(tag) -> None:
    """Compare with an open hinge, with a closed one, and in the first task."""
    g, method = golden("fedcprompt_c2"), create_method("fedcprompt")
    features = g[f"in.{tag}.f"].clone().requires_grad_()
    last = None if tag == "first" else g[f"in.{tag}.f_previous"]
    loss = method.contrast_loss(
        features, g[f"in.{tag}.f_global"], last, torch.ones(len(features)).to(features)
    )
    torch.testing.assert_close(loss, g[f"out.{tag}.c2"], rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, features)
    torch.testing.assert_close(gradient, g[f"out.{tag}.c2_grad"], rtol=1e-9, atol=1e-12)


def test_fedcprompt_contrast_by_hand(noise):
    """Compare the contrast with a value worked out by hand.

    Features moved by e from those of both global and last model give 1 + 990 |e|^2. Padding does
    not count.
    """
    method, start = create_method("fedcprompt"), noise(3, 4)
    end = start + torch.tensor([[0.3, 0, 0.4, 0], [0, 0, 0, 0], [9, 9, 9, 9]]).double()
    weight = torch.tensor([1.0, 1, 0]).double()
    assert float(method.contrast_loss(end, start, start, weight)) == pytest.approx(1 + 990 * 0.25)
    assert float(method.contrast_loss(start, start, start, weight)) == 1
    assert float(method.contrast_loss(start, start, None, weight)) == 0
    assert (
        float(method.contrast_loss(start, start, start + 1, weight)) == 0
    )  # the last model is far


def test_fedcprompt_weights_ignore_constant_attention_shift(noise):
    """Keep the weights, which use a softmax over the D entries; CODA-Prompt's weights change."""
    tree = {f"component.0.{part}": noise(3, 6) for part in ("key", "attention")}
    shift = {**tree, "component.0.attention": tree["component.0.attention"] + 5}
    query = noise(2, 6)
    for name, same in (("fedcprompt", True), ("codap", False)):
        method = create_method(name)
        pair = method.weights(tree, 0, query), method.weights(shift, 0, query)
        assert torch.allclose(*pair) == same
        torch.testing.assert_close(method.weights(tree, 0, 3 * query), pair[0], **CLOSE)
    masked_query = query[:1] * tree["component.0.attention"][0].softmax(-1)
    key = tree["component.0.key"][:1]
    by_hand = torch.nn.functional.cosine_similarity(masked_query, key)
    weight = create_method("fedcprompt").weights(tree, 0, query)[0, 0]
    assert float(weight) == pytest.approx(float(by_hand))


def test_fedcprompt_last_model_uses_finished_components(record, batch_of):
    """Match features after the previous task without the current components."""
    run = record("fedcprompt")
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    data = batch_of(run.method, run.bench.train, call.clients[0].index[:4])
    ours = {k: v for k, v in call.state.items() if not k.startswith("component.")}
    pair = [run.method.features(run.bench.backbone, tree, data) for tree in (ours, run.states[0])]
    torch.testing.assert_close(*pair, **CLOSE)


# --- PIP


def test_pip_pools_variances_over_clients():
    """Pool features 0 and 2 of one client and 4 of another.

    The mean is 2, the variance (0 + 4 + 16) / 3 - 4.
    """
    method, task = create_method("pip"), Task(0, 0, 2, 2, 1)

    def upload(client: int, values: list[float]) -> Payload:
        column = torch.tensor(values, dtype=torch.float64)
        sums = {
            "count": [len(values), 0],
            "sum": [column.sum(), 0],
            "squares": [column.square().sum(), 0],
        }
        tensors = {f"proto.{k}": torch.tensor(v, dtype=torch.float64) for k, v in sums.items()}
        tensors = {k: v if k.endswith("count") else v[:, None] for k, v in tensors.items()}
        return Payload({"general": torch.full((1,), float(client)), **tensors}, client, len(values))

    payloads = [upload(0, [0.0, 2.0]), upload(1, [4.0])]

    def first(uploads):
        return dict(uploads[0])

    start = {name: torch.zeros(2, 1, dtype=torch.float64) for name in ("mean", "spread")}
    start["held"] = torch.zeros(2)
    for quirk, spread in ((False, math.sqrt(20 / 3 - 4)), (True, 16.0)):
        method = create_method("pip", code_variance=quirk)
        state = method.server_update(start, method.aggregate(payloads, first), server_context(task))
        assert state["mean"].tolist() == [[2.0], [0.0]]
        assert state["held"].tolist() == [1, 0]
        assert float(state["spread"][0]) == pytest.approx(spread)
        assert not any(k.startswith("proto.") for k in state)


def test_pip_injects_three_prototypes_per_held_class(noise):
    """Inject three prototypes of each held class.

    Draws of 0 only in the first dimension give u = 0; without spread all three are the mean.
    """
    method, task = create_method("pip"), Task(1, 2, 4, 4, 2)
    head = {"head.weight": noise(4, DIM), "head.bias": noise(4)}
    mean = noise(2, DIM)
    broadcast = {"mean": mean, "spread": torch.zeros_like(mean), "held": torch.tensor([1.0, 0.0])}
    data = batch(noise(3, DIM), [2, 3, 2])._replace(draws=torch.full((3, 1), 0.25).double())
    loss = method.prototype_loss(head, data, Context(task, 1, 2, broadcast))
    logits = (mean[:1] @ head["head.weight"].T + head["head.bias"])[:, 2:]
    three_means = 3 * torch.nn.functional.cross_entropy(logits, torch.tensor([0]))
    torch.testing.assert_close(loss, three_means)
    wide = method.prototype_loss(
        head, data, Context(task, 1, 2, {**broadcast, "spread": torch.ones_like(mean)})
    )
    assert not torch.allclose(wide, loss)


def test_pip_injects_from_second_round(record):
    run = record("pip")
    for call in run.rounds:
        assert bool(call.state["held"].any()) == (call.ctx.round > 0)
