"""Runs that start from a saved model: their state, and missing parts of a model."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fczoo.core.errors import FczooError
from fczoo.core.types import Task
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.local_rules import CONTROL
from fczoo.federation.model_record import SERVER_STATE
from fczoo.federation.run import FederatedRun
from fczoo.federation.warm_start import grow, load_start
from fczoo.models.storage import save_model
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_methods import first_tasks
from helpers_resume import Crash, crash_after, rounds, run_and_record


def save_first_tasks(bench: Benchmark, method: str, folder: Path, tasks: int = 2) -> FederatedRun:
    """Run the first tasks of the toy benchmark and save the model."""
    run = bench.start(small_method(method))
    for _ in islice(run, tasks):
        pass
    save_model(folder, run)
    return run


def bench_from_model(bench: Benchmark, folder: Path, tasks: int = 2) -> Benchmark:
    """Return the toy benchmark for a run that starts from a model of its first tasks."""
    settings = replace(bench.settings, start_from=str(folder))
    return replace(bench, settings=settings, stream=replace(bench.stream, learned_count=tasks))


def test_saved_model_includes_control_variates(tmp_path):
    """Match an uninterrupted run; control variates begin at zero in the next task."""
    bench = toy_bench(torch.float32, local="scaffold", epochs=1, batch_size=8)
    first, method = save_first_tasks(bench, "fedclm", tmp_path), small_method("fedclm")
    control = first.server.controls.server
    assert {"head.weight", "head.bias", "lora.0.q.a"} <= set(control)
    assert control["head.weight"].abs().max() > 0
    kept = load_file(tmp_path / SERVER_STATE)
    assert all(torch.equal(kept[f"{CONTROL}{name}"], value) for name, value in control.items())
    again, uninterrupted = bench_from_model(bench, tmp_path).start(method), bench.start(method)
    assert again.run().accuracy == uninterrupted.run().accuracy
    assert all(torch.equal(value, uninterrupted.state[name]) for name, value in again.state.items())


def test_clients_start_without_memory(tmp_path, caplog):
    bench = toy_bench(torch.float32, epochs=1, batch_size=8, rounds=1)
    save_first_tasks(bench, "icarl", tmp_path)
    run = bench_from_model(bench, tmp_path).start(small_method("icarl"))
    assert len(run.run().accuracy) == 3
    assert "icarl continues without the memory of its clients" in caplog.text


def test_resumed_run_matches_uninterrupted_run(tmp_path):
    bench = toy_bench(torch.float32, epochs=1, batch_size=8)
    save_first_tasks(bench, "fedclm", tmp_path / "model", tasks=1)
    bench, method = bench_from_model(bench, tmp_path / "model", tasks=1), small_method("fedclm")
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Crash):
        run_and_record(bench, method, tmp_path / "run", Checkpoint(path, crash_after(2)))
    resumed = run_and_record(bench, method, tmp_path / "run", Checkpoint(path))
    uninterrupted = run_and_record(bench, method, tmp_path / "whole")
    assert resumed.accuracy == uninterrupted.accuracy and resumed.start == uninterrupted.start != {}
    assert resumed.bytes_down == uninterrupted.bytes_down
    assert rounds(tmp_path / "run") == rounds(tmp_path / "whole")


def test_bytes_rounds_and_curve_cover_only_new_tasks(tmp_path):
    bench = toy_bench(torch.float32, epochs=1, batch_size=8)
    save_first_tasks(bench, "fedclm", tmp_path)
    lines = []
    run = bench_from_model(bench, tmp_path).start(small_method("fedclm"))
    run.callback.round = lines.append
    result = run.run()
    assert [(line["task"], line["round"]) for line in lines] == [(2, 0), (2, 1)]
    # an upload in each of two rounds by three clients, and one of statistics
    assert result.client_rounds == 9 and [point[0] for point in result.curve] == [2]
    assert result.start["tasks"] == 2


def test_grow_adds_entries_of_larger_start():
    small = {"head": torch.zeros(2, 1), "keys": torch.zeros(1, 3), "scale": torch.zeros(4)}
    large = {
        "head": torch.tensor([[5.0], [6], [7]]),
        "keys": torch.ones(2, 3),
        "scale": small["scale"],
    }
    state = {
        "head": torch.tensor([[1.0], [2]]),
        "teacher.head": torch.tensor([[3.0], [4]]),
        "keys": torch.empty(0, 3),  # those of the learned tasks are taken out
        "scale": torch.arange(4),
    }
    grown = grow("some", state, small, large)
    assert grown["head"].tolist() == [[1], [2], [7]]
    assert grown["teacher.head"].tolist() == [[3], [4], [0]]
    assert grown["keys"].tolist() == [[1, 1, 1]] and grown["scale"] is state["scale"]


def test_state_divided_among_tasks_cannot_grow():
    small, large = {"prompts": torch.zeros(5, 2)}, {"prompts": torch.zeros(3, 2)}
    with pytest.raises(FczooError, match="some sizes the tensor prompts at the start of a run"):
        grow("some", small, small, large)


@pytest.mark.parametrize("method", ["dualprompt", "pilora"])
def test_methods_learn_more_tasks_than_planned(method, tmp_path):
    bench = toy_bench(torch.float32, epochs=1, batch_size=8, rounds=1)
    short = first_tasks(bench, 2)
    planned = tuple(Task(t.index, t.start, t.stop, 5, 2) for t in short.stream.tasks)
    short = replace(short, stream=replace(short.stream, tasks=planned))
    save_first_tasks(short, method, tmp_path)
    run = bench_from_model(bench, tmp_path).start(small_method(method))
    result = run.run()
    assert len(result.accuracy) == 3
    start_accuracy = load_start(
        bench_from_model(bench, tmp_path), small_method(method), 0
    ).record.accuracy
    assert result.accuracy[:2] == start_accuracy
