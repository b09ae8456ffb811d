"""Interrupt runs at every file operation and compare the resumed runs with whole ones."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fczoo import FczooError
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.settings import Settings
from fczoo.reports.run_config import RunConfig
from fczoo.runner.configs import make_sweep
from fczoo.runner.run_control import lock_folder
from fczoo.runner.sweep import run_sweep

TIMES = ("sha256", "seconds", "peak MB", "peak_memory", "phases", "started")
WRITING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
GROWING = ("open", "os.mkdir", "os.rename")  # operations that fail on a full disk
SMALL = {
    "train_per_class": 4,
    "test_per_class": 2,
    "rounds": 1,
    "epochs": 1,
    "tasks": 2,
    "clients": 2,
}


def sweep(folder: str = "", method: str = "fedavg") -> dict[Path, list[RunConfig]]:
    options = {"fedavg": {"tune": "head"}}
    settings = Settings.for_dataset("digits", device="cpu", image_size=32, **SMALL)
    return make_sweep(Path(folder), settings, [method], options=options)


def hook_file_operations(folder: Path, act: Callable[[str], None]) -> None:
    """Call ``act`` before each operation that changes the folder.

    The hook stays active until the process ends.
    """

    def hook(event: str, arguments: tuple) -> None:
        writes = event in WRITING or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and str(arguments[0]).startswith(str(folder)):
            act(event)

    sys.addaudithook(hook)


def in_child(work: Callable[[], None]) -> int:
    """Do the work in a forked process and return its exit code: 0, or 1 after an exception."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write_operations(out: Path, counted: Path) -> None:
    """Run the sweep and write the names of its file operations to a file."""
    operations: list[str] = []
    hook_file_operations(out, operations.append)
    run_sweep(sweep(), out)
    counted.write_text("\n".join(operations))


def interrupt_run(out: Path, last: int, fault: str) -> None:
    """Run the sweep until operation number ``last``.

    Then the run is killed, or the disk is full from this operation on.
    """
    count = [0]

    def act(event: str) -> None:
        count[0] += 1
        if count[0] >= last and fault == "killed":
            os._exit(9)
        if count[0] >= last and event in GROWING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hook_file_operations(out, act)
    run_sweep(sweep(), out)


def timeless(tree):
    if isinstance(tree, dict):
        return {k: timeless(v) for k, v in tree.items() if k not in TIMES}
    return [timeless(v) for v in tree] if isinstance(tree, list) else tree


def folder_contents(folder: Path) -> dict[str, object]:
    """Return the contents of a run folder without times.

    Tables are listed without their content.
    """
    contents = {}
    for path in folder.rglob("*"):
        content: object = path.suffix
        if path.suffix in (".json", ".jsonl") and path.name != "summary.json":
            content = [timeless(json.loads(line)) for line in _objects(path)]
        if path.is_file() and path.name != ".lock":
            contents[str(path.relative_to(folder))] = content
    return contents


def _objects(path: Path) -> list[str]:
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a killed run needs its own process, forked")
@pytest.mark.parametrize("fault", ["killed", "disk full"])
def test_run_recovers_after_any_file_operation(tmp_path, monkeypatch, fault):
    bench = Benchmark.open(sweep()[Path()][0].settings)
    monkeypatch.setattr(Benchmark, "open", lambda settings: bench)
    reference, count_file = tmp_path / "whole", tmp_path / "count"
    run_sweep(sweep(), tmp_path / "first")  # imports all modules before the fork
    assert in_child(lambda: write_operations(reference, count_file)) == 0
    contents = folder_contents(reference)
    assert {"bench.json", "partition.json", "fedavg/seed0/result.json"} <= contents.keys()
    for last, event in enumerate(count_file.read_text().splitlines(), 1):
        if fault == "disk full" and event not in GROWING:
            continue  # succeeds on a full disk; the next failing operation is tested separately
        out = tmp_path / f"last-{last}"
        in_child(lambda out=out, last=last: interrupt_run(out, last, fault))
        run_sweep(sweep(), out)
        assert folder_contents(out) == contents, f"operation {last}"


def test_sweep_and_its_run_folder_exclude_each_other(tmp_path, monkeypatch):
    """Reject a second process in a folder, started as a sweep or as a single run."""
    monkeypatch.setattr(Benchmark, "open", lambda settings: pytest.fail("the run began"))
    runs = {**sweep("a"), **sweep("b", "fedncm")}
    with lock_folder(tmp_path / "grid" / "b"):
        with pytest.raises(FczooError, match=r"another process is running in .*/grid/b"):
            run_sweep(runs, tmp_path / "grid")
        assert not (tmp_path / "grid" / "a").exists()

    def open_during_sweep(settings: Settings) -> Benchmark:
        run_sweep(sweep(), tmp_path / "grid" / "a")
        raise AssertionError("the second run began")

    monkeypatch.setattr(Benchmark, "open", open_during_sweep)
    with pytest.raises(FczooError, match=r"another process is running in .*/grid/a"):
        run_sweep(runs, tmp_path / "grid")
