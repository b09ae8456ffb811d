"""Local training: clients that do not communicate, and the evaluation of their models."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fczoo import FczooError, Settings
from fczoo.core.tree import select
from fczoo.data.client_index import ClientIndex
from fczoo.federation.evaluate import accuracy_row, evaluate
from fczoo.federation.result import check_result
from fczoo.models.storage import save_model
from fczoo.runner.configs import ExecutionConfig, make_sweep
from fczoo.runner.sweep import run_sweep
from fczoo.testing.toy_benchmark import TASKS, TEST, small_method, toy_bench


def bench_of_two_clients():
    """Give client 0 four images of class 0 and one of class 1, client 1 those of class 2."""
    bench = toy_bench(torch.float32)
    positions = bench.partition.tasks[0].positions
    labels = dict(zip(bench.stream.train_index.tolist(), bench.stream.train.labels, strict=True))
    of_class = [np.array([i for i in positions if labels[int(i)] == c]) for c in range(3)]
    first = np.concatenate([of_class[0][:4], of_class[1][:1]])
    tasks = (ClientIndex([first, of_class[2], positions[:0]]), *bench.partition.tasks[1:])
    return replace(bench, partition=replace(bench.partition, tasks=tasks))


def test_accuracy_is_mean_over_client_models():
    """Compare accuracies with values worked out by hand.

    Client 0 always predicts class 0, and client 1 class 2, the only class that it has had.
    """
    method = small_method("local", tune="head")
    weight = torch.zeros(7, 32)
    models = {
        client: {"head.weight": weight, "head.bias": torch.tensor([3.0, 1, 2, 9, 9, 9, 9])}
        for client in (0, 1)
    }
    bench = bench_of_two_clients()
    evaluation = evaluate(method, bench, models, TASKS[0], 4)
    assert evaluation.accuracy == [pytest.approx(100 / 3)]
    assert evaluation.accuracy == accuracy_row(method, bench, models, TASKS[0], 4)
    assert evaluation.class_accuracy == [50.0, 0.0, 50.0]
    assert evaluation.confusion == [
        [label, answer, TEST] for label in range(3) for answer in (0, 2)
    ]
    assert evaluation.client_accuracy == [pytest.approx(80.0), 100.0, None]


def test_client_resumes_from_own_model(watch):
    """Match FedAvg's first round without its average, and start the next round where it ended."""
    ours, fedavg = (
        watch(toy_bench(epochs=1), small_method(name, tune="head")) for name in ("local", "fedavg")
    )
    first, second = ours.rounds[:2]
    for upload in fedavg.rounds[0].payloads:
        model = second.memories[upload.client]
        assert model.keys() == {"head.weight", "head.bias"}
        assert all(torch.equal(model[name], upload[name]) for name in model)
    assert not first.memories and ours.result.bytes_up == ours.result.bytes_down == 0
    assert not any(payload.tensors for call in ours.rounds for payload in call.payloads)
    assert check_result(ours.result) is ours.result
    assert ours.result.metrics["client_mean"] == pytest.approx(np.mean(ours.result.client_accuracy))


def test_head_starts_at_class_means_of_client(watch):
    run = watch(toy_bench(rounds=1), small_method("local", tune="head", head_init="means"))
    call, bench = run.rounds[0], run.bench
    client = call.clients[0]
    memory = run.method.before_training(
        bench.backbone, call.engine.trainer.images_of(client), call.ctx
    )
    labels, features = bench.train.labels[client.index], bench.train.query(client.index)
    for c in range(3):
        rows = features[labels == c]
        expected = F.normalize(rows.mean(0), dim=0) if len(rows) else torch.zeros(32).double()
        torch.testing.assert_close(memory["head.weight"][c], expected)
    again = replace(call.ctx, memory={**memory, "head.weight": memory["head.weight"] + 1})
    kept = run.method.before_training(bench.backbone, call.engine.trainer.images_of(client), again)
    assert torch.equal(kept["head.weight"], again.memory["head.weight"])


def test_personal_models_start_from_client_models():
    """Give personal models the accuracy of the clients' models at rate zero."""
    bench = toy_bench(torch.float32, epochs=1, rounds=1, personal_epochs=2)
    result = bench.run(small_method("local", tune="head", lr=0.0, head_init="means"))
    assert result.personal_accuracy == result.client_accuracy
    assert result.metrics["personal_mean"] == result.metrics["client_mean"] > 0
    trained = bench.run(small_method("local", tune="head", lr=0.1))
    assert trained.personal_accuracy != trained.client_accuracy


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": "median"},
        {"local": "fedprox:0.1"},
        {"server_optimizer": "fedadam:0.01"},
        {"compress": "int8"},
        {"attack": "scale:10"},
        {"dp_clip": 1.0},
        {"min_clients": 2},
        {"min_class_count": 2},
    ],
)
def test_upload_settings_are_rejected(settings):
    with pytest.raises(FczooError, match="clients of local send none; leave out one of the two"):
        toy_bench(**settings).check(small_method("local"))


def test_diagnostics_are_rejected_before_any_run_starts(tmp_path):
    settings = Settings.for_dataset("digits", train_per_class=8, test_per_class=1)
    sweep = make_sweep(Path(), settings, ["fedncm", "local"], [0], {})
    with pytest.raises(FczooError, match=r"--diagnostics needs uploads .* local has neither"):
        run_sweep(sweep, tmp_path / "run", ExecutionConfig(diagnostics=True))
    assert not list(tmp_path.rglob("result.json"))


def test_global_model_access_is_rejected(tmp_path):
    run = toy_bench(rounds=1, epochs=1).start(small_method("local", tune="head"))
    next(iter(run))
    assert not select(run.state, "client") and len(run.own_models) == 3
    with pytest.raises(FczooError, match="local trains a model per client and has no global model"):
        save_model(tmp_path, run)
    with pytest.raises(FczooError, match=r"call method\.features with one of run\.own_models"):
        run.features()
