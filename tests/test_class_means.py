"""FedNCM: the nearest mean of all images."""

import pytest
import torch
import torch.nn.functional as F

from fczoo import Batch, create_method
from helpers_methods import DIM


@pytest.mark.parametrize("distance", ["euclid", "cosine"])
def test_fedncm_is_the_nearest_mean_of_all_images(make_bench, watch, batch_of, distance):
    run = watch(make_bench(), create_method("fedncm", distance=distance))
    train, test = run.bench.train, run.bench.test
    data, asked = (batch_of(run.method, store, torch.arange(len(store.labels))) for store in (train, test))
    means = torch.stack([data.q[data.y == c].mean(0) for c in range(7)])
    torch.testing.assert_close(run.states[2]["mean"], means, rtol=1e-9, atol=1e-9)
    logits = run.method.predict(run.bench.backbone, run.states[2], asked, run.bench.stream.tasks[2])
    near = F.cosine_similarity(asked.q[:, None], means[None], dim=-1) if distance == "cosine" else -torch.cdist(asked.q, means)
    assert torch.equal(logits.argmax(1), near.argmax(1))


def test_fedncm_never_answers_a_class_without_images(backbone, tasks):
    state = {"mean": torch.zeros(7, DIM, dtype=torch.float64), "count": torch.tensor([1.0, 0, 1, 0, 0, 0, 0])}
    state["mean"][0] = 100.0
    state["mean"][2] = -100.0
    asked = Batch(torch.empty(1, 0), torch.tensor([0]), torch.ones(1), torch.zeros(1, DIM, dtype=torch.float64))
    assert create_method("fedncm").predict(backbone, state, asked, tasks[0]).argmax() in (0, 2)
