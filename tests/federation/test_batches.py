"""Batches of the engine: views, query features, and only the inputs that a method requests."""

from dataclasses import dataclass, replace

import pytest
import torch

from fczoo import Batch, Context, Method
from fczoo.data.views import Augment, get_augment
from fczoo.federation.batches import Client
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from helpers_engine import TASK, Toy


@dataclass(frozen=True)
class RecordsBatches(Toy):
    """Record the batches of the loss and of the pass after it."""

    view: str = "test"

    def training(self):
        return replace(
            super().training(),
            inputs=["images", "query"],
            collect_at={"after_training"},
            collect_view=self.view,
        )

    def loss(self, backbone, train, batch, ctx):
        BATCHES.append(batch)
        return batch.mean(batch.query[:, 0] * train["w"][0]), {}

    def collect(self, phase, backbone, tree, batch, ctx):
        BATCHES.append(batch)
        return {"count": batch.w.sum(), "weighted": (batch.w * batch.query[:, 0]).sum()}


BATCHES: list[Batch] = []


@pytest.fixture
def train_and_record(make_bench):
    def go(method: Method, augment: Augment, cache_queries: bool = False, pass_size: int = 64):
        """Return store, batch of the only step, batches of the pass after it and payload.

        The client has six images.
        """
        BATCHES.clear()
        bench = make_bench()
        engine = ClientEngine(
            method,
            bench.backbone,
            bench.train,
            Plan(1, 6, augment, 0, cache_queries=cache_queries, pass_size=pass_size),
        )
        state = {"w": torch.zeros(2, dtype=torch.float64)}
        payload = engine.train(
            state, [Client(0, torch.arange(20, 26))], Context(TASK, 0, 1, state)
        )[0]
        return bench.train, BATCHES[0], BATCHES[1:], payload

    return go


@pytest.mark.parametrize("cached", [False, True])
def test_queries_match_training_view_unless_cached(train_and_record, backbone, cached):
    store, step, _, _ = train_and_record(
        RecordsBatches(), get_augment("crop"), cache_queries=cached
    )
    tests = store.view(torch.arange(20, 26))
    assert not any(torch.allclose(x, t, atol=0.1) for x in step.x for t in tests)
    of_random, of_test = backbone(step.x), store.query(torch.arange(20, 26))
    if cached:
        assert sorted(step.query[:, 0].tolist()) == sorted(of_test[:, 0].tolist())
    else:
        torch.testing.assert_close(step.query, of_random, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("view", ["test", "train"])
def test_pass_after_training_uses_collect_view(train_and_record, backbone, view):
    store, _, (batch,), payload = train_and_record(RecordsBatches(view=view), get_augment("crop"))
    same = [
        torch.equal(x, t) for x, t in zip(batch.x, store.view(torch.arange(20, 26)), strict=True)
    ]
    assert all(same) if view == "test" else not any(same)
    torch.testing.assert_close(batch.query, backbone(batch.x), rtol=1e-10, atol=1e-10)
    assert payload["count"] == 6


@pytest.mark.parametrize("view", ["test", "train"])
def test_pass_after_training_does_not_depend_on_pass_size(train_and_record, view):
    _, _, one_batch, one = train_and_record(RecordsBatches(view=view), get_augment("crop"))
    _, _, parts, two = train_and_record(RecordsBatches(view=view), get_augment("crop"), pass_size=4)
    assert [len(b.y) for b in one_batch] == [6] and [len(b.y) for b in parts] == [4, 2]
    torch.testing.assert_close(one["weighted"], two["weighted"], rtol=1e-10, atol=1e-10)


def test_batches_hold_only_requested_inputs(make_bench, batch_of):
    bench, index = make_bench(), torch.arange(4)
    for inputs, shapes in {
        ("images",): ((4, 3, 16, 16), (4, 0)),
        ("query",): ((4, 0), (4, 32)),
        ("images", "query"): ((4, 3, 16, 16), (4, 32)),
    }.items():

        class WithInputs(Toy):
            def training(self, inputs=inputs):
                return replace(super().training(), inputs=inputs)

        batch = batch_of(WithInputs(), bench.train, index)
        assert (batch.x.shape, batch.query.shape) == shapes
