"""Runs with clients in different tasks: images recur in stages, and sums count each once."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import FczooError, create_method
from fczoo.core.registry import METHODS
from fczoo.core.training import Scope
from fczoo.data.client_stages import stream_with_stages, tasks_by_stage, to_stages
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.result import read_result, write_result
from fczoo.federation.scenario import Scenario
from fczoo.reports.tables import column_of
from fczoo.security.attacks import Attackers
from fczoo.testing import small_method

# tasks of three clients by stage; one client moves on per stage
PLACES = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def bench_with_stages(
    bench: Benchmark, moving: int = 1, order_seed: int | None = None
) -> Benchmark:
    """Return the toy benchmark with clients that move on alternately."""
    places = tasks_by_stage(3, 3, moving, order_seed)
    partition = to_stages(bench.partition, places)
    stream = stream_with_stages(bench.stream, partition, places)
    stores = (ImageStore(part, bench.backbone) for part in (stream.train, stream.test))
    return Benchmark(bench.settings, stream, partition, bench.backbone, *stores)


def test_stages_of_toy_benchmark(make_bench) -> None:
    assert tasks_by_stage(3, 3, 1).tolist() == PLACES


@pytest.mark.parametrize("scope", ["task", "latest"])
def test_statistics_count_each_image_once(make_bench, scope: Scope) -> None:
    plain, bench = make_bench(), bench_with_stages(make_bench())
    survey_indices: dict[int, list[int]] = {}
    for task in bench.stream.tasks:
        clients = bench.clients(task, scope)
        for client in clients:
            assert len(client.index.unique()) == len(client.index)
        for client in bench.without_counted_images(clients, task, scope):
            survey_indices.setdefault(client.number, []).extend(client.index.tolist())
    holders = plain.clients(plain.stream.tasks[-1], "seen")
    once = {client.number: sorted(client.index.tolist()) for client in holders}
    assert {number: sorted(index) for number, index in survey_indices.items()} == once


@pytest.mark.parametrize("scope", ["seen", "pooled"])
def test_statistics_of_cumulative_scopes_use_all_images(make_bench, scope: Scope) -> None:
    bench = bench_with_stages(make_bench())
    for task in bench.stream.tasks:
        clients = bench.clients(task, scope)
        assert [c.index.tolist() for c in bench.without_counted_images(clients, task, scope)] == [
            c.index.tolist() for c in clients
        ]


def test_earlier_images_exclude_current_task_of_client(make_bench) -> None:
    plain, bench = make_bench(), bench_with_stages(make_bench())
    for task, places in zip(bench.stream.tasks, PLACES, strict=True):
        for client in bench.clients(task, idle=True):
            earlier_tasks = plain.stream.tasks[: places[client.number]]
            earlier_indices = [
                plain.clients(t, idle=True)[client.number].index for t in earlier_tasks
            ]
            assert client.earlier.tolist() == [i for part in earlier_indices for i in part.tolist()]


def test_statistics_without_stages_use_all_images(make_bench) -> None:
    for bench in (make_bench(), make_bench(domains=True)):
        for task in bench.stream.tasks:
            clients = bench.clients(task)
            survey_clients = bench.without_counted_images(clients, task, "task")
            assert [c.index.tolist() for c in survey_clients] == [c.index.tolist() for c in clients]


SUMS = ["fedncm", "fedridge", "afcl", "stsa", "fedlda", "fecam"]


@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=8, deadline=None)
@given(moving=st.integers(1, 3), order_seed=st.none() | st.integers(0, 99))
def test_analytic_methods_match_run_without_stages(name, moving, order_seed) -> None:
    from fczoo.testing import toy_bench

    method = small_method(name)
    runs = []
    for bench in (toy_bench(), bench_with_stages(toy_bench(), moving, order_seed)):
        run = bench.start(method)
        run.run()
        runs.append(run)
    plain, ours = runs
    for key, value in plain.state.items():
        torch.testing.assert_close(ours.state[key], value, rtol=1e-8, atol=1e-8)
    assert ours.result.metrics["A_N"] == pytest.approx(plain.result.metrics["A_N"])
    assert ours.result.uploaded.keys() == plain.result.uploaded.keys()


def test_methods_without_recurring_classes_are_rejected(make_bench) -> None:
    bench = bench_with_stages(make_bench(rounds=1, epochs=1))
    for name in METHODS.names():
        method = small_method(name)
        if method.supports_recurring_classes:
            bench.check(method)
            continue
        with pytest.raises(
            FczooError,
            match=f"^{name} does not support labels that return .* .tasks domains, blurry, moving or",
        ):
            bench.check(method)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedclm", "ewc", "fedlora", "joint", "ranpac", "stsae", "fedcof"]
)
def test_run_with_stages(make_bench, name: str) -> None:
    bench = bench_with_stages(make_bench(rounds=1, epochs=1))
    result = bench.run(small_method(name))
    assert [len(row) for row in result.accuracy] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(result.test_counts) == 21 and 0 in result.test_counts  # a stage may bring no class
    empty_stages = {i for i, count in enumerate(result.test_counts) if not count}
    assert all(
        np.isnan(row[i]) == (i in empty_stages) for row in result.accuracy for i in range(len(row))
    )
    assert np.isfinite(list(result.metrics.values())).all()


def test_head_rows_of_later_classes_start_at_means(make_bench) -> None:
    """Start a row at its class mean over the clients that have the class first.

    FedAvg runs one round without steps.
    """
    bench = bench_with_stages(make_bench(rounds=1, epochs=1))
    method = create_method("fedavg", head_init="means", tune="head", lr=0.0)
    run = bench.start(method)
    run.run()
    weight = run.state["head.weight"]
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(7).to(weight))
    training_run = bench_with_stages(make_bench(rounds=1, epochs=1)).start(replace(method, lr=0.1))
    for task in training_run:
        rows = training_run.state["head.weight"].norm(dim=1) > 0
        assert (
            rows[: task.stop][bench.classes_with_images(task)].all() and not rows[task.stop :].any()
        )


def test_hostile_labels_are_flipped_once(make_bench) -> None:
    bench = bench_with_stages(make_bench(attack="label-flip", attackers=0.4))
    attackers = bench.uplink(create_method("fedavg"), 0).attackers
    assert isinstance(attackers, Attackers) and attackers.numbers
    labels, stream = attackers.mislabel(bench.stream, bench.partition), bench.stream
    stops = [task.stop for task in stream.tasks]
    for k, parts in enumerate(zip(*bench.partition.tasks, strict=True)):
        for stage, part in enumerate(parts):
            positions = np.searchsorted(stream.train_index, part)
            new = positions if not stage else positions[~np.isin(part, parts[stage - 1])]
            true = stream.train.labels[new]
            expected_labels = stops[stage] - 1 - true if k in attackers.numbers else true
            assert labels[new].tolist() == expected_labels.tolist()


def test_run_interrupted_after_each_round_matches(make_bench, tmp_path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    method, path = small_method("fedclm", tune="head"), tmp_path / "checkpoint"
    reference, stops = bench_with_stages(make_bench(epochs=1)).run(method), 0
    while True:
        bench = bench_with_stages(make_bench(epochs=1))
        try:
            result = bench.run(method, checkpoint=Checkpoint(path, stop))
            break
        except Stop:
            stops += 1
    assert stops == 7 * 2 + 6  # every round, and every stage but the last
    assert repr(result.accuracy) == repr(reference.accuracy)
    assert result.bytes_up == reference.bytes_up


def test_partial_participation_counts_each_image_once(make_bench, watch) -> None:
    """Count an image in the first stage in which its owner is drawn.

    EWC collects statistics from clients that trained.
    """
    bench = bench_with_stages(make_bench(rounds=1, epochs=1, participation=0.34))
    run = watch(bench, small_method("ewc"))
    met: dict[int, set[int]] = {}
    survey_indices: dict[int, list[int]] = {}
    by_stage = {call.ctx.task.index: call for call in run.calls if call.phase == "task_end"}
    for task in bench.stream.tasks:
        (call,) = (c for c in run.rounds if c.ctx.task.index == task.index)
        for client in call.clients:
            new = set(client.index.tolist()) - met.setdefault(client.number, set())
            met[client.number] |= new
            batches = [c.index.tolist() for c in by_stage[task.index].clients] if new else []
            assert [set(index) for index in batches] == ([new] if new else [])
            survey_indices.setdefault(client.number, []).extend(new)
        assert (task.index in by_stage) == bool(new)
    assert (
        sum(map(len, survey_indices.values()))
        == sum(len(set(index)) for index in survey_indices.values())
        > 0
    )


@pytest.mark.parametrize("name", ["fedncm", "ewc"])
def test_late_clients_have_no_earlier_images(make_bench, name: str) -> None:
    """Give the last of three clients only images of the last task."""
    bench = make_bench(rounds=1, epochs=1, domains=True)
    tasks = bench.partition.tasks
    late = (*((*parts[:-1], parts[-1][:0]) for parts in tasks[:-1]), tasks[-1])
    grown = replace(bench, partition=replace(bench.partition, tasks=late))
    last = grown.stream.tasks[-1]
    clients_by_number = {c.number: c for c in grown.clients(last, idle=True)}
    with mock.patch.object(Scenario, "clients", without_last_client(Scenario.clients, last)):
        survey_clients = grown.without_counted_images(
            list(clients_by_number.values()), last, "task"
        )
        assert survey_clients[-1].index.tolist() == clients_by_number[2].index.tolist()
        assert len(survey_clients[-1].index)
        result = grown.run(small_method(name))
    assert len(result.accuracy[-1]) == len(tasks)


def without_last_client(clients, last):
    """Wrap ``Scenario.clients``: the last client is missing in tasks before the last."""

    def some(self, task, *rest, **more):
        all_clients = clients(self, task, *rest, **more)
        return all_clients if task.index == last.index else all_clients[:2]

    return some


def test_client_task_accuracy_follows_from_class_accuracy(make_bench) -> None:
    """Weigh the accuracies of classes by hand with the images of each task of each client."""
    staged = bench_with_stages(make_bench(rounds=1, epochs=1))
    bench = replace(staged, settings=replace(staged.settings, moving=1))
    result = bench.run(small_method("fedavg"))
    assert result.client_tasks == [  # client 2 has no images of the second task
        *([0, 0, 0], [1, 0, 1], [2, 0, 2], [0, 1, 3], [1, 2, 4], [0, 4, 6], [1, 5, 6], [2, 6, 6])
    ]
    labels = dict(zip(bench.stream.train_index, bench.stream.train.labels, strict=True))
    for stage, row in enumerate(result.client_task_accuracy):
        tasks = [entry for entry in result.client_tasks if entry[1] <= stage]
        by_hand = [
            np.mean(
                [
                    result.class_accuracy[stage][labels[i]]
                    for i in bench.partition.tasks[first][client]
                ]
            )
            for client, first, _ in tasks
        ]
        assert row == pytest.approx(by_hand)
    assert result.metrics["client_task_final"] == pytest.approx(
        np.mean(result.client_task_accuracy[-1])
    )
    assert not make_bench(rounds=1, epochs=1).run(small_method("fedavg")).client_tasks


def test_transfer_is_relative_to_local_training(make_bench, tmp_path) -> None:
    """Compare local training with itself: its forward transfer is zero.

    A result is read back.
    """
    staged = bench_with_stages(make_bench(rounds=1, epochs=1))
    bench = replace(staged, settings=replace(staged.settings, moving=1))
    local, ours = (bench.run(small_method(name)) for name in ("local", "fedavg"))
    forward, total = map(column_of, ("client_task_forward", "client_task_total"))
    assert forward.reference == total.reference == "local"
    assert forward.against(local, local) == 0.0
    ends = [
        np.mean(
            [
                ours.client_task_accuracy[s][j] - local.client_task_accuracy[s][j]
                for j, entry in enumerate(ours.client_tasks)
                if entry[2] == s
            ]
        )
        for s in (0, 1, 2, 3, 4, 6)  # in stage 5 none ends
    ]
    assert forward.against(ours, local) == pytest.approx(np.mean(ends))
    assert np.isnan(forward.against(replace(ours, client_tasks=[]), local))
    write_result(tmp_path / "ours.json", ours)
    again = read_result(tmp_path / "ours.json")
    assert again.client_task_accuracy == ours.client_task_accuracy
