"""``--jobs``: the same numbers side by side, and a process that dies costs its own run only."""

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
    """Return the processes that hold the rounds of a run of this folder open, once there is one.

    Any file of its folder would not do: until its own program is loaded, a child holds what its
    parent does.
    """
    for _ in range(6000):
        if workers := holders(out, "/rounds.jsonl"):
            return workers
        time.sleep(0.01)
    raise AssertionError("no worker began a run")


def test_runs_side_by_side_give_the_numbers_of_runs_in_turn(tmp_path):
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
    assert about["command"][:2] == ["fczoo", "bench"]  # though it was begun as a module of Python


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_a_worker_that_dies_costs_its_own_run_and_is_begun_again(tmp_path):
    bench = start(tmp_path, "pilora", "--seeds", "0,1", *LONG)
    os.kill(workers_of(tmp_path)[0], signal.SIGKILL)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert stderr.count("its process died; restarting it") == 1
    assert len(numbers(tmp_path)) == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_told_to_stop_every_worker_saves_its_round_and_the_same_command_goes_on(tmp_path):
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
def test_a_bench_that_is_killed_leaves_none_of_the_files_that_it_lent(tmp_path):
    loans = tmp_path / "lent"
    loans.mkdir()
    options = ["--seeds", "0,1", *LONG]
    bench = start(tmp_path / "out", "pilora", *options, env={**ONE_THREAD, "TMPDIR": str(loans)})
    workers_of(tmp_path / "out")
    assert list(loans.rglob("*.weights"))
    bench.kill()
    bench.communicate(timeout=100)
    for _ in range(600):  # workers end after the round in which they are
        if not list(loans.glob("fczoo-*")):
            return
        time.sleep(0.1)
    raise AssertionError(f"left over: {list(loans.rglob('*'))}")


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5", "4096", ""])
def test_a_number_of_jobs_that_cannot_be_is_one_line(word):
    with pytest.raises(FczooError, match="--jobs"):
        parse_jobs(word)
