"""SLCA: exact moments, aged means, logits normed by task.

The aligned head answers; the other learns on.
"""

from dataclasses import replace

import pytest
import torch

from fczoo import Task, create_method
from fczoo.core.tree import select
from fczoo.functional.gaussians import draw_per_gaussian
from fczoo.functional.losses import cross_entropy_by_task_norm
from helpers_payload import server_context


def test_the_loss_by_hand():
    """Compare the loss with a value worked out by hand.

    Logits (3, 4 | 12) of tasks of two and one class: norms 5 and 12, mean 8.5; over 8.5 and 0.5.
    """
    logits, label = torch.tensor([[3.0, 4.0, 12.0]]), torch.tensor([2])
    logits_by_norm = logits / 8.5 / 0.5
    by_hand = logits_by_norm.logsumexp(1) - logits_by_norm[0, 2]
    loss = cross_entropy_by_task_norm(logits, label, [2, 1], 0.5)
    assert float(loss) == pytest.approx(float(by_hand), abs=1e-6)


def test_as_many_features_are_drawn_of_each_class(rng):
    cov = torch.tensor([[[4.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    mean = torch.tensor([[1.0, -1.0], [5.0, 5.0]], dtype=torch.float64)
    gauss = {"gauss.label": torch.tensor([3, 7]), "gauss.mean": mean, "gauss.cov": cov}
    features, labels = draw_per_gaussian(gauss, 4000, rng)
    assert labels.bincount()[[3, 7]].tolist() == [4000, 4000]
    assert labels[:4000].unique().numel() == 2
    assert torch.equal(features[labels == 7], mean[1].expand(4000, 2))
    torch.testing.assert_close(features[labels == 3].mean(0), mean[0], atol=0.12, rtol=0)
    torch.testing.assert_close(features[labels == 3].mT.cov(), cov[0], atol=0.4, rtol=0)


def test_means_of_old_tasks_are_drawn_shorter(rng, monkeypatch):
    """Means of old tasks are shorter.

    In the second of two tasks the first one's means are times 0.9 + 0.1 / 2, the second one's as
    they are.
    """
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


def test_the_aligned_head_answers_and_the_other_one_learns_on(record):
    run = record("slca")
    first, last = run.states[0], run.states[2]
    assert torch.equal(first["aligned.head.weight"], first["head.weight"])  # nothing to align
    assert not torch.allclose(last["aligned.head.weight"], last["head.weight"])
    assert torch.equal(last["head.weight"][:3], first["head.weight"][:3])  # of the old classes
    assert last["sizes"].tolist() == [3, 2, 2] and len(last["gauss.label"]) == 7


def test_moments_are_those_of_all_images_in_one_place(record, batch_of):
    run = record("slca")
    bench, state = run.bench, run.states[2]
    (index,) = torch.where(bench.train.labels == 5)
    features = run.method.features(bench.backbone, state, batch_of(run.method, bench.train, index))
    row = {k: v[state["gauss.label"] == 5][0] for k, v in select(state, "gauss.").items()}
    torch.testing.assert_close(row["gauss.mean"], features.mean(0).detach())
    torch.testing.assert_close(row["gauss.cov"], features.detach().mT.cov())
