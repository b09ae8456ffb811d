"""LGA: group weights against recorded outputs, the radius, and noisy features for evaluation."""

from dataclasses import replace

import pytest
import torch

from fczoo import Batch, Context, Task, create_method
from helpers_golden import golden
from helpers_payload import server_context

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("scenario", ["t1", "t1_nolearned", "t2_noold", "t3"])
def test_losses_match_recorded_outputs(monkeypatch, scenario, cumulative):
    g = {
        k.split(f".{scenario}.")[1]: v
        for k, v in golden("lga_loss").items()
        if f".{scenario}." in k
    }
    t, size = int(g["task"]), int(g["task_size"])
    logits, labels = g["logits"].clone().requires_grad_(), g["label"]
    method = create_method("lga", cumulative_groups=cumulative)
    task = Task(t, t * size, (t + 1) * size, (t + 1) * size, t + 1)
    batch = Batch(logits, labels, torch.ones(len(labels)), logits, g["old_logits"])
    old_classes = torch.zeros(task.classes, dtype=torch.bool)
    old_classes[g["learned"]] = True
    sizes = torch.tensor([size] * (t + 1))
    weights = method.group_weights(logits, batch, old_classes, sizes)
    official = g["w"] if cumulative else g["w_disjoint"]
    if scenario != "t1_nolearned" or cumulative:
        torch.testing.assert_close(weights, official, **CLOSE)
    assert scenario != "t3" or (g["w"] - g["w_disjoint"]).abs().max() > 1
    monkeypatch.setattr(type(method), "logits", lambda self, backbone, train, batch: logits)
    loss, _ = method.loss(
        None, {}, batch, Context(task, 0, 1, {"sizes": sizes}, {"learned": old_classes})
    )
    if cumulative or scenario != "t3":
        torch.testing.assert_close(loss, g["loss_total"], **CLOSE)
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(gradient, g["grad_total"], **CLOSE)


def test_radius_by_hand():
    """Compute the radius from features 0 and 2 of one class and 5 of another.

    The variance is 2 in both dimensions, so the radius is the root of 2.
    """
    method, state = create_method("lga"), {"monitor.radius": torch.zeros(())}
    sums = {
        "spread.count": torch.tensor([2.0, 1.0]),
        "spread.sum": torch.tensor([[2.0, 2.0], [5.0, 5.0]]),
        "spread.squares": torch.tensor([[4.0, 4.0], [25.0, 25.0]]),
    }
    first = method.update_from("task_end", state, sums, server_context(Task(0, 0, 2, 4, 2)))
    assert float(first["monitor.radius"]) == pytest.approx(2**0.5)
    assert method.update_from("task_end", first, sums, server_context(Task(1, 2, 4, 4, 2))) is first


def test_features_are_augmented_with_noise(rng):
    method, ctx = (
        create_method("lga", augmentations=3),
        server_context(Task(0, 0, 2, 2, 1), rng=rng),
    )
    features, labels = torch.zeros(400, 2), torch.arange(400) % 2
    noisy, copies = method.augment_features(
        features, labels, {"monitor.radius": torch.tensor(0.5)}, ctx
    )
    assert noisy.shape == (1200, 2) and torch.equal(copies[400:800], labels)
    assert 0.4 < float(noisy.std()) < 0.6


def test_monitor_accuracy_is_zero_in_warmup_rounds(monkeypatch):
    from fczoo.baselines.glfc import GLFC

    monkeypatch.setattr(GLFC, "monitor_accuracy", lambda self, state, ctx: torch.tensor(0.7))
    method, ctx = create_method("lga", warmup=2), server_context(Task(0, 0, 2, 2, 1))
    accuracies = [float(method.monitor_accuracy({}, replace(ctx, round=r))) for r in range(4)]
    assert accuracies == pytest.approx([0, 0, 0.7, 0.7])
