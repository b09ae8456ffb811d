"""Test ``--jobs``: parallel runs, worker deaths and stop requests."""

import json
import os
import re
import shlex
import signal
import time
from itertools import product
from pathlib import Path

import pytest

from fczoo.cli.arguments import parse_jobs
from fczoo.core.errors import FczooError
from helpers_bench import ONE_THREAD, holders, numbers, start, wait_for
from helpers_cli import TINY

pytestmark = pytest.mark.slow
LONG = shlex.split(
    "--train-per-class 8 --test-per-class 4 --clients 2 --tasks 2 --rounds 5 --epochs 1 --jobs 2"
)
"""Rounds of pilora on digits: seconds in which a worker can be stopped."""


def workers_of(out: Path) -> list[int]:
    """Wait for processes that have ``rounds.jsonl`` of a run open, and return them.

    Other files do not identify a worker: a new child first has the same files open as its parent.
    """
    for _ in range(6000):
        if workers := holders(out, "/rounds.jsonl"):
            return workers
        time.sleep(0.01)
    raise AssertionError("no worker began a run")


def test_parallel_runs_match_sequential_runs(tmp_path):
    for name, options in {"turn": [], "side": ["--jobs", "2"]}.items():
        code, stderr = wait_for(
            start(tmp_path / name, "fedncm,hgp", "--seeds", "0,1", *TINY, *options)
        )
        assert code == 0, stderr
    assert len(numbers(tmp_path / "turn")) == 4
    assert numbers(tmp_path / "side") == numbers(tmp_path / "turn")
    assert "4 of 4 runs ended" in stderr and "leaked" not in stderr
    for method, seed in product(("fedncm", "hgp"), (0, 1)):
        task_lines = re.findall(
            rf"run \d of 4, {method} seed {seed}: task (\d) of 3, ([\d.]+) %", stderr
        )
        result = numbers(tmp_path / "side")[f"{method}/seed{seed}/result.json"]
        assert [task for task, _ in task_lines] == ["1", "2", "3"]
        assert float(task_lines[-1][1]) == pytest.approx(result["metrics"]["A_N"], abs=0.06)
    about = json.loads((tmp_path / "side" / "bench.json").read_text())
    assert about["hardware"]["threads"] == 1
    assert about["command"][:2] == ["fczoo", "bench"]  # although started as a Python module


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_dead_worker_is_restarted(tmp_path):
    bench = start(tmp_path, "pilora", "--seeds", "0,1", *LONG)
    os.kill(workers_of(tmp_path)[0], signal.SIGKILL)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert stderr.count("its process died; restarting the run") == 1
    assert len(numbers(tmp_path)) == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_stopped_workers_save_round_and_resume(tmp_path):
    options = ["--seeds", "0,1", *LONG]
    bench = start(tmp_path, "pilora", *options)
    workers_of(tmp_path)
    bench.send_signal(signal.SIGTERM)
    code, stderr = wait_for(bench)
    assert code == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    code, stderr = wait_for(start(tmp_path, "pilora", *options))
    assert code == 0, stderr
    assert len(numbers(tmp_path)) == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_killed_bench_leaves_no_shared_files(tmp_path):
    shared_folder = tmp_path / "lent"
    shared_folder.mkdir()
    options = ["--seeds", "0,1", *LONG]
    bench = start(
        tmp_path / "out", "pilora", *options, env={**ONE_THREAD, "TMPDIR": str(shared_folder)}
    )
    workers_of(tmp_path / "out")
    assert list(shared_folder.rglob("*.weights"))
    bench.kill()
    bench.communicate(timeout=100)
    for _ in range(600):  # workers finish their round first
        if not list(shared_folder.glob("fczoo-*")):
            return
        time.sleep(0.1)
    raise AssertionError(f"left over: {list(shared_folder.rglob('*'))}")


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5", "4096", ""])
def test_invalid_jobs_is_rejected(word):
    with pytest.raises(FczooError, match="--jobs"):
        parse_jobs(word)
