"""Class means for any partition: FedNCM, FedCLM and the prototypes of FedProto."""

import pytest
import torch
import torch.nn.functional as F

from fczoo import Batch, Context, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from helpers_methods import CLOSE, DIM, batch
from helpers_payload import server_context


@pytest.mark.parametrize("distance", ["euclid", "cosine"])
def test_fedncm_equals_centralised_nearest_mean(make_bench, watch, batch_of, distance):
    run = watch(make_bench(), create_method("fedncm", distance=distance))
    train, test = run.bench.train, run.bench.test
    data, queries = (
        batch_of(run.method, store, torch.arange(len(store.labels))) for store in (train, test)
    )
    means = torch.stack([data.query[data.y == c].mean(0) for c in range(7)])
    torch.testing.assert_close(run.states[2]["mean"], means, rtol=1e-9, atol=1e-9)
    logits = run.method.predict(
        run.bench.backbone, run.states[2], queries, run.bench.stream.tasks[2]
    )
    scores = (
        F.cosine_similarity(queries.query[:, None], means[None], dim=-1)
        if distance == "cosine"
        else -torch.cdist(queries.query, means)
    )
    assert torch.equal(logits.argmax(1), scores.argmax(1))


def test_fedncm_never_predicts_class_without_images(backbone, tasks):
    state = {
        "mean": torch.zeros(7, DIM, dtype=torch.float64),
        "count": torch.tensor([1.0, 0, 1, 0, 0, 0, 0]),
    }
    state["mean"][0] = 100.0
    state["mean"][2] = -100.0
    batch = Batch(
        torch.empty(1, 0),
        torch.tensor([0]),
        torch.ones(1),
        torch.zeros(1, DIM, dtype=torch.float64),
    )
    assert create_method("fedncm").predict(backbone, state, batch, tasks[0]).argmax() in (0, 2)


def test_class_means_do_not_depend_on_partition(record, batch_of):
    """Match the centralised class means for FedNCM and FedCLM."""
    for name, key in (("fedncm", "mean"), ("fedclm", "mean")):
        run = record(name)
        store, last = run.bench.train, run.states[2]
        data = batch_of(run.method, store, torch.arange(len(store.labels)))
        features = (
            data.query if name == "fedncm" else run.method.features(run.bench.backbone, last, data)
        )
        for c in (5, 6) if name == "fedclm" else range(7):
            torch.testing.assert_close(last[key][c], features[data.y == c].mean(0), **CLOSE)


def test_fedproto_prototypes_are_pooled_class_means(noise, tasks):
    """Pool class means if all clients share one model."""
    method, task = create_method("fedproto", tune="head"), tasks[0]
    x, y = noise(9, DIM), torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 0])
    payloads = []
    for k, part in enumerate((slice(0, 2), slice(2, 5), slice(5, 9))):
        sums = method.collect(
            "after_training", None, {}, batch(x[part], y[part]), Context(task, 0, 1, {})
        )
        payloads.append(Payload(sums, k))
    start = {"all.mean": torch.zeros(7, DIM, dtype=torch.float64), "all.known": torch.zeros(7)}
    forward, backward = (
        method.server_update(start, method.aggregate(p, fedavg), server_context(task))
        for p in (payloads, payloads[::-1])
    )
    for c in (0, 1):
        torch.testing.assert_close(forward["prototype.mean"][c], x[y == c].mean(0), **CLOSE)
    torch.testing.assert_close(forward["prototype.mean"], backward["prototype.mean"], **CLOSE)
    assert forward["prototype.known"].tolist() == [1, 1, 0]
    assert forward["prototype.mean"].isfinite().all()


def test_fedproto_resets_prototypes_each_task(record):
    run = record("fedproto")
    for call in run.rounds:
        mask = call.state["prototype.known"]
        assert len(mask) == call.ctx.task.size
        assert bool(mask.any()) == (call.ctx.round > 0)
    assert run.states[2]["all.known"].tolist() == [1.0] * 7
