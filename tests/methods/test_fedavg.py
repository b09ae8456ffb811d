"""FedAvg and its uses in other baselines: trained tensors, the start of new rows, the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Task
from fczoo.core.tree import select
from fczoo.data.views import Augment
from fczoo.federation.batches import Rows
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from fczoo.functional.losses import task_cross_entropy
from helpers_methods import CLOSE, batch


@pytest.mark.parametrize("tune", ["full", "lora", "head"])
def test_fedavg_trains_tensors_of_tune_option(make_bench, small_method, watch, tune):
    run = watch(make_bench(rounds=1, epochs=1), small_method("fedavg", tune=tune))
    start, end = run.rounds[0].state, run.states[2]
    kinds = {"full": {"head", "full"}, "lora": {"head", "lora"}, "head": {"head"}}[tune]
    assert {name.partition(".")[0] for name in end} == kinds
    changes = {name for name, value in end.items() if not torch.equal(value, start[name])}
    assert {name.partition(".")[0] for name in changes} == kinds
    assert set(run.rounds[0].payloads[0]) == set(end)


@pytest.mark.parametrize(
    "name", ["fedavg", "ewc", "lwf", "fedproto", "ccvr", "glfc", "fedclm", "joint"]
)
@pytest.mark.parametrize("tune", ["lora", "head"])
def test_every_tune_option_runs(make_bench, small_method, watch, name, tune):
    run = watch(make_bench(), small_method(name, tune=tune))
    prefixes = {"lora": {"head.", "lora."}, "head": {"head."}}[tune]
    assert set(run.method.training().optims) == prefixes
    assert not select(run.states[2], "full.")
    for prefix in prefixes:
        start = next(c for c in run.rounds if c.ctx.task.index == 0).state
        assert any(not torch.equal(run.states[0][k], start[k]) for k in select(start, prefix))
    if name != "joint":  # joint starts again in every task
        assert len(run.result.accuracy[2]) == 3


def test_head_tuning_step_equals_centralised_step(make_bench, small_method, watch):
    """Compare one gradient step over all clients with the centralised step on frozen features."""
    bench = make_bench(batch_size=100, epochs=1, rounds=1)
    method = small_method("fedavg", tune="head")
    assert method.training().inputs == ["query"]
    run = watch(bench, method)
    call = run.rounds[0]
    trainer = ClientEngine(
        method, bench.backbone, bench.train, Plan(1, 100, Augment(), seed=0)
    ).trainer
    union = trainer.batch([Rows(torch.cat([c.index for c in call.clients]))])
    train = {k: v.clone().requires_grad_() for k, v in select(call.state, "head.").items()}

    def gradient(data: Batch) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                method.loss(bench.backbone, train, data, call.ctx)[0], list(train.values())
            )
        )

    central = gradient(Batch(*(v[0] for v in union)))
    parts = [
        (len(c.index), gradient(Batch(*(v[0] for v in trainer.batch([Rows(c.index)])))))
        for c in call.clients
    ]
    total = sum(n for n, _ in parts)
    for i, value in enumerate(central):
        torch.testing.assert_close(sum(n / total * g[i] for n, g in parts), value, **CLOSE)


@pytest.mark.parametrize(
    ("name", "options"),
    [("ewc", {"strength": 0.0}), ("lwf", {"strength": 0.0}), ("fedproto", {"strength": 0.0})],
)
def test_method_with_zero_strength_equals_fedavg(make_bench, small_method, watch, name, options):
    plain = watch(make_bench(aggregator="fedavg"), small_method("fedavg"))
    ours = watch(make_bench(aggregator="fedavg"), small_method(name, **options))
    for task in range(3):
        for key, value in select(plain.states[task], "head.", "full.").items():
            assert torch.equal(ours.states[task][key], value), key


def test_fedavg_initialises_new_rows_at_class_means(make_bench, small_method, watch, batch_of):
    run = watch(make_bench(), small_method("fedavg", tune="head", head_init="means"))
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    data = batch_of(run.method, run.bench.train, torch.arange(len(run.bench.train.labels)))
    for c in (3, 4):
        torch.testing.assert_close(
            call.state["head.weight"][c],
            F.normalize(data.query[data.y == c].mean(0), dim=0),
            **CLOSE,
        )
        assert call.state["head.bias"][c] == 0
    assert torch.equal(call.state["head.weight"][:3], run.states[0]["head.weight"][:3])


def test_task_cross_entropy_shifts_labels_by_first_class(noise):
    """Shift labels by the task's first class, not modulo its size.

    Label 4 of a task 4..6 is its first class; y % 3 would make it the second.
    """
    logits, task = noise(3, 7), Task(1, 4, 7, 7, 2)
    loss = task_cross_entropy(logits, batch(logits, [4, 5, 6]), task)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits[:, 4:], torch.tensor([0, 1, 2])), **CLOSE
    )
