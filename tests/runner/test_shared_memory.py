"""Test a benchmark that worker processes share through memory-mapped files."""

import resource
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from fczoo import Benchmark, FczooError, Settings, create_method
from fczoo.core.errors import InterruptedCommandError
from fczoo.data.dataset import Images
from fczoo.runner import executors
from fczoo.runner.configs import ExecutionConfig, RunSpec
from fczoo.runner.shared_memory import ALIGNMENT, share

SMALL = {
    "tasks": 2,
    "clients": 2,
    "rounds": 1,
    "epochs": 1,
    "train_per_class": 6,
    "test_per_class": 3,
}


@pytest.fixture(scope="module")
def bench() -> Benchmark:
    return Benchmark.open(Settings.for_dataset("digits", device="cpu", **SMALL))


def test_shared_benchmark_equals_original(bench: Benchmark, tmp_path: Path) -> None:
    again = share(bench, tmp_path).open()
    assert again.settings == bench.settings and again.partition == bench.partition
    assert (again.backbone.config, again.backbone.sha256) == (
        bench.backbone.config,
        bench.backbone.sha256,
    )
    for name, weight in bench.backbone.weights.items():
        copy = again.backbone.weights[name]
        assert torch.equal(copy, weight) and copy.dtype == weight.dtype
        assert copy.data_ptr() % ALIGNMENT == 0  # alignment keeps matrix products bit-identical
    for ours, theirs in (
        (again.stream.train, bench.stream.train),
        (again.stream.test, bench.stream.test),
    ):
        assert np.array_equal(ours.pixels, theirs.pixels)
        assert np.array_equal(ours.labels, theirs.labels)
        assert isinstance(ours.pixels, np.memmap)


@pytest.mark.parametrize("name", ["fedncm", "pilora"])
def test_shared_benchmark_gives_identical_run(name: str, bench: Benchmark, tmp_path: Path) -> None:
    runs = [
        scenario.start(create_method(name, "digits"))
        for scenario in (bench, share(bench, tmp_path).open())
    ]
    ours, theirs = (run.run().accuracy for run in runs)
    assert ours == theirs
    assert all(torch.equal(value, runs[1].state[key]) for key, value in runs[0].state.items())


def test_shared_files_are_written_once(bench: Benchmark, tmp_path: Path) -> None:
    share(bench, tmp_path)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert sorted(file.suffix for file in files) == [".u8", ".u8", ".weights"]
    share(bench, tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files


def test_mapped_pixels_are_not_copied(bench: Benchmark, tmp_path: Path) -> None:
    pixels = bench.stream.train.pixels
    pixels.tofile(tmp_path / "cache.u8")
    memmap = np.memmap(tmp_path / "cache.u8", np.uint8, "c", shape=pixels.shape)
    stream = replace(bench.stream, train=Images(memmap, bench.stream.train.labels))
    assert share(replace(bench, stream=stream), tmp_path).train.file == tmp_path / "cache.u8"


def test_worker_changes_stay_private(bench: Benchmark, tmp_path: Path) -> None:
    shared = share(bench, tmp_path)
    first, second = shared.open(), shared.open()
    first.backbone.weights["norm.bias"] += 1
    first.stream.train.pixels[0] = 0
    assert torch.equal(second.backbone.weights["norm.bias"], bench.backbone.weights["norm.bias"])
    assert np.array_equal(second.stream.train.pixels, bench.stream.train.pixels)


def test_unwritable_folder_is_rejected(bench: Benchmark, tmp_path: Path) -> None:
    with pytest.raises(
        FczooError, match=r"cannot share data and weights with --jobs in .*TMPDIR"
    ) as caught:
        share(bench, tmp_path / "missing")
    assert "\n" not in str(caught.value)


def test_full_disk_is_reported(bench: Benchmark, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(FczooError, match=r": \d+ requested and \d+ written; free some space"):
            share(bench, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("killed", "end"), [(True, "stopped"), (False, "failed")])
def test_worker_of_killed_command_prints_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    killed: bool,
    end: str,
) -> None:
    """Print a traceback for missing shared files only if the command was not killed."""

    def check_interrupt() -> None:
        if killed:
            raise InterruptedCommandError("stopped on request", signal.SIGTERM)

    def open_missing(_: RunSpec) -> Benchmark:
        raise FileNotFoundError("weights")

    monkeypatch.setattr(executors, "open_benchmark", open_missing)
    run = cast(RunSpec, SimpleNamespace(folder_of_run=tmp_path))
    outcome = executors.work(run, ExecutionConfig(), check_interrupt)
    assert outcome.status == end
    assert ("Traceback" in capsys.readouterr().err) is not killed
