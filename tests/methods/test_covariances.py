"""FedLDA and FeCAM: distances from covariances, against the formulas."""

import torch

from fczoo import Task, create_method
from helpers_analytic import Wide, images, query_batch, states_after_tasks

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def test_fedlda_matches_formulas(rng):
    x, y = images(5)
    means = torch.stack([x[y == c].mean(0) for c in range(5)])
    scatter, task = sum(5 * torch.cov(x[y == c].mT) for c in range(5)), Task(0, 0, 5, 5, 1)
    for rule, divisor in (("mahalanobis", 25), ("lda", 30)):
        method = create_method("fedlda", rule=rule, shrink=0.2)
        state = states_after_tasks(
            method, [[(x, y)]], [task], method.begin_task({}, task, Wide(4), rng)
        )[-1]
        logits = method.predict(None, state, query_batch(x), task)
        s = scatter / divisor
        inverse = torch.linalg.inv(s + 0.2 * s.diagonal().mean() * torch.eye(4).double())
        gap = x[:, None] - means
        scores = -torch.einsum("bci,ij,bcj->bc", gap, inverse, gap)
        if rule == "lda":
            scores = scores / 2 + torch.tensor(0.2).double().log()
        difference = logits - scores
        torch.testing.assert_close(difference, difference[:, :1].expand(-1, 5), **TIGHT)


def test_fedlda_with_large_shrinkage_is_nearest_mean(rng):
    x, y = images(6)
    task, method = Task(0, 0, 5, 5, 1), create_method("fedlda", shrink=1e9)
    state = states_after_tasks(
        method, [[(x, y)]], [task], method.begin_task({}, task, Wide(4), rng)
    )[-1]
    means = torch.stack([x[y == c].mean(0) for c in range(5)])
    nearest = torch.cdist(x, means).argmin(1)
    assert torch.equal(method.predict(None, state, query_batch(x), task).argmax(1), nearest)


def test_fecam_matches_formulas(rng):
    """Give class 4, which has one image, the mean covariance of the other classes."""
    x, y = images(7)
    mask = (y != 4) | (torch.arange(30) == 4)
    x, y, task = x[mask], y[mask], Task(0, 0, 5, 5, 1)
    unit = torch.nn.functional.normalize(x, dim=-1)
    covariances = [torch.cov(unit[y == c].mT) for c in range(4)]
    covariances.append(sum(covariances) / 4)
    for options in ({}, {"shrink_apart": 1.0}, {"covariance": "full"}, {"covariance": "diagonal"}):
        method = create_method("fecam", shrink=0.5, **options)
        state = states_after_tasks(
            method, [[(x, y)]], [task], method.begin_task({}, task, Wide(4), rng)
        )[-1]
        logits = method.predict(None, state, query_batch(x), task)
        for c, s in enumerate(covariances):
            eye = torch.eye(4, dtype=torch.float64)
            if options.get("covariance") == "diagonal":
                s = torch.diag(s.diagonal())
            off_diagonal_mean = (s.sum() - s.trace()) / 12
            s = (
                s
                + 0.5 * s.trace() / 4 * eye
                + options.get("shrink_apart", 0.0) * off_diagonal_mean * (1 - eye)
            )
            if "covariance" not in options:
                s = s / s.diagonal().outer(s.diagonal()).sqrt()
            gap = unit - unit[y == c].mean(0)
            scores = -torch.einsum("bi,ij,bj->b", gap, torch.linalg.inv(s), gap)
            torch.testing.assert_close(logits[:, c], scores, **TIGHT)
