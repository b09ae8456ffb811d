"""Personal models: fine-tuned copies of the final model at each client."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fczoo.core.types import Context
from fczoo.data.client_index import ClientIndex
from fczoo.federation.checkpoint import ClientState
from fczoo.federation.evaluate import trained_copy
from fczoo.federation.server import broadcast
from fczoo.testing.toy_benchmark import TASKS, small_method, toy_bench


def finish_run(bench, name: str = "fedavg"):
    """Return a finished run and the parts with which its clients train."""
    run = bench.start(small_method(name))
    list(run)
    trainer = run._engine(replace(run._plan(), epochs=3)).trainer
    ctx = Context(TASKS[2], 1, 2, broadcast(run.method, run.state))
    return run, trainer, ctx


def test_personal_model_equals_trained_upload() -> None:
    """Compare with the upload of FedAvg's clients, which are their trained tensors."""
    run, trainer, ctx = finish_run(toy_bench())
    clients = run.scenario.clients(TASKS[2])
    engine = run._engine(trainer.plan)
    uploads = engine.train(ctx.shared, clients, ctx)
    state = {k: v.clone() for k, v in run.state.items()}
    for client, upload in zip(clients, uploads, strict=True):
        copy = trained_copy(trainer, client, ClientState({}, {}, {}, {}), ctx)
        assert copy.keys() == {k for k in upload if k in copy}
        assert all(torch.equal(copy[k], upload[k]) for k in copy)
        assert any(not torch.equal(copy[k], state[k]) for k in copy)
    assert all(torch.equal(state[k], run.state[k]) for k in state)


@pytest.mark.parametrize("name", ["icarl", "glfc", "lwf"])
def test_fine_tuning_keeps_memory_and_teacher_cache(name: str) -> None:
    run, trainer, ctx = finish_run(toy_bench(epochs=1), name)
    memories = {k: {n: v.clone() for n, v in tree.items()} for k, tree in run.memories.items()}
    cache = {k: dict(outputs) for k, outputs in run.teacher_cache.items()}
    for client in run.scenario.clients(TASKS[2]):
        trained_copy(trainer, client, ClientState(run.memories, run.teacher_cache, {}, {}), ctx)
    assert {k: v.keys() for k, v in run.teacher_cache.items()} == {
        k: v.keys() for k, v in cache.items()
    }
    assert run.memories.keys() == memories.keys()
    for k, tree in memories.items():
        assert all(torch.equal(value, run.memories[k][n]) for n, value in tree.items())


def test_fine_tuning_fits_client_of_one_class() -> None:
    """Fine-tune a client that has only class 6 of the last task.

    All its images are of this class, so its accuracy is then 100 %. A client without images of the
    task keeps the global model's accuracy.
    """
    bench = toy_bench(torch.float32)
    labels = dict(zip(bench.stream.train_index.tolist(), bench.stream.train.labels, strict=True))
    last = bench.partition.tasks[2].positions
    sixth = np.array([i for i in last if labels[int(i)] == 6])
    others = np.array([i for i in last if labels[int(i)] != 6])
    none = last[:0]
    tasks = (
        ClientIndex([bench.partition.tasks[0].positions, none, none]),
        ClientIndex([none, none, bench.partition.tasks[1].positions]),
        ClientIndex([others, sixth, none]),
    )
    bench = replace(bench, partition=replace(bench.partition, tasks=tasks))
    assert Counter(len(t[1]) for t in tasks) == {0: 2, 10: 1}
    method = replace(small_method("fedavg"), lr=0.1)
    plain = replace(bench).run(method)
    personal = replace(bench, settings=replace(bench.settings, personal_epochs=20)).run(method)
    assert personal.client_accuracy == plain.client_accuracy
    assert personal.personal_accuracy[1] == 100.0
    assert personal.personal_accuracy[2] == plain.client_accuracy[2]
    assert personal.metrics["personal_worst"] == min(personal.personal_accuracy)
    assert plain.personal_accuracy == [] and personal.phases["personal"] > 0
