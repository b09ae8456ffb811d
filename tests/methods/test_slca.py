"""SLCA: exact moments, decayed means, logits normalised by task, and the aligned head."""

from dataclasses import replace

import pytest
import torch

from fczoo import Task, create_method
from fczoo.core.tree import select
from fczoo.functional.gaussians import draw_per_gaussian
from fczoo.functional.losses import cross_entropy_by_task_norm
from helpers_payload import server_context


def test_loss_by_hand():
    """Compare the loss with a value worked out by hand.

    Logits (3, 4 | 12) of tasks of two and one class have norms 5 and 12, with mean 8.5. They are
    divided by 8.5 and 0.5.
    """
    logits, label = torch.tensor([[3.0, 4.0, 12.0]]), torch.tensor([2])
    logits_by_norm = logits / 8.5 / 0.5
    by_hand = logits_by_norm.logsumexp(1) - logits_by_norm[0, 2]
    loss = cross_entropy_by_task_norm(logits, label, [2, 1], 0.5)
    assert float(loss) == pytest.approx(float(by_hand), abs=1e-6)


def test_draws_same_number_of_features_per_class(rng):
    cov = torch.tensor([[[4.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    mean = torch.tensor([[1.0, -1.0], [5.0, 5.0]], dtype=torch.float64)
    gauss = {"gauss.label": torch.tensor([3, 7]), "gauss.mean": mean, "gauss.cov": cov}
    features, labels = draw_per_gaussian(gauss, 4000, rng)
    assert labels.bincount()[[3, 7]].tolist() == [4000, 4000]
    assert labels[:4000].unique().numel() == 2
    assert torch.equal(features[labels == 7], mean[1].expand(4000, 2))
    torch.testing.assert_close(features[labels == 3].mean(0), mean[0], atol=0.12, rtol=0)
    torch.testing.assert_close(features[labels == 3].mT.cov(), cov[0], atol=0.4, rtol=0)


def test_means_of_old_tasks_are_scaled_down(rng, monkeypatch):
    """Scale the means of the first of two tasks by 0.9 + 0.1 / 2, and keep those of the second."""
    from fczoo.baselines import slca

    gaussians = {}
    monkeypatch.setattr(
        slca, "train_head", lambda head, classes, draw, *rest, **more: draw() and head
    )
    monkeypatch.setattr(
        slca, "draw_per_gaussian", lambda gauss, number, rng: gaussians.update(gauss) or True
    )
    ones = torch.ones(3, 2, dtype=torch.float64)
    gauss = {"gauss.label": torch.tensor([0, 1, 2]), "gauss.mean": ones}
    gauss["gauss.cov"] = torch.zeros(3, 2, 2, dtype=torch.float64)
    ctx = replace(server_context(Task(1, 2, 3, 3, 2)), rng=rng)
    create_method("slca", jitter=0.5).align_head({}, gauss, [2, 1], ctx)
    torch.testing.assert_close(
        gaussians["gauss.mean"], ones * torch.tensor([[0.95], [0.95], [1.0]]).double()
    )
    assert torch.equal(gaussians["gauss.cov"], 0.5 * torch.eye(2).double().expand(3, 2, 2))


def test_aligned_head_differs_from_trained_head(record):
    run = record("slca")
    first, last = run.states[0], run.states[2]
    assert torch.equal(first["aligned.head.weight"], first["head.weight"])  # nothing to align
    assert not torch.allclose(last["aligned.head.weight"], last["head.weight"])
    assert torch.equal(last["head.weight"][:3], first["head.weight"][:3])  # rows of old classes
    assert last["sizes"].tolist() == [3, 2, 2] and len(last["gauss.label"]) == 7


def test_moments_equal_centralised_moments(record, batch_of):
    run = record("slca")
    bench, state = run.bench, run.states[2]
    (index,) = torch.where(bench.train.labels == 5)
    features = run.method.features(bench.backbone, state, batch_of(run.method, bench.train, index))
    row = {k: v[state["gauss.label"] == 5][0] for k, v in select(state, "gauss.").items()}
    torch.testing.assert_close(row["gauss.mean"], features.mean(0).detach())
    torch.testing.assert_close(row["gauss.cov"], features.detach().mT.cov())
