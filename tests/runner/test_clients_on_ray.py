"""Compare clients that Ray distributes with runs in one process, also after worker deaths."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import helpers_bench
from fczoo.runner.configs import ExecutionConfig
from helpers_bench import numbers, wait_for

pytest.importorskip("ray", reason="needs Ray")
pytestmark = pytest.mark.slow
SMALL = [
    "--train-per-class",
    "8",
    "--test-per-class",
    "5",
    "--tasks",
    "2",
    "--rounds",
    "2",
    "--epochs",
    "1",
]
SMALL += ["--clients", "20"]  # enough for requests of two clients
ON_RAY = ["--executor", "ray", "--cluster", "spread=clients", "--jobs", "2"]


def start(
    out: Path, methods: str, *options: str, python: str | None = None
) -> subprocess.Popen[str]:
    """Start a bench whose home is next to its run folder."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(out.parent)}
    # Ray's workers do not survive in a process that was forked from a warm one
    python = python or sys.executable
    return helpers_bench.start(out, methods, *SMALL, *options, env=env, python=python)


def losses(out: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(out.rglob("rounds.jsonl")) for line in file.open()]
    return [(line["task"], line["round"], line["loss"], line["bytes_up"]) for line in lines]


def process_tree(process: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return [process]
    return [process, *(member for child in children for member in process_tree(int(child)))]


def busy_workers(process: int) -> list[int]:
    """Return the processes of a bench whose Ray actors work for clients.

    Ray writes the current call of an actor into its process name.
    """
    busy_actors = []
    for member in process_tree(process):
        try:
            if b"Worker.answer" in Path(f"/proc/{member}/cmdline").read_bytes():
                busy_actors.append(member)
        except OSError:
            continue
    return busy_actors


def wait_until(condition: Callable[[], list], bench: subprocess.Popen) -> list:
    for _ in range(12000):
        if result := condition():
            return result
        assert bench.poll() is None, bench.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("it never came")


@pytest.fixture(scope="module")
def sequential_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that runs methods in one process and returns the run folder."""

    def run(methods: str, *options: str) -> Path:
        out = tmp_path_factory.mktemp("turn") / "run"
        code, stderr = wait_for(start(out, methods, *options))
        assert code == 0, stderr
        return out

    return run


def test_run_is_bit_identical_after_worker_death(sequential_run, tmp_path):
    """Compare a run with a killed worker to a run in one process.

    The methods have prompts, exemplars with a teacher, and only statistics.
    """
    methods, out = "l2p,icarl,fedridge", tmp_path / "run"
    bench = start(
        out, methods, *ON_RAY, python=sys.executable
    )  # busy_workers() searches its child processes
    (victim, *_) = wait_until(lambda: busy_workers(bench.pid), bench)
    os.kill(victim, signal.SIGKILL)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert "a worker died" in stderr and "Traceback" not in stderr
    in_one_process = sequential_run(methods)
    assert len(numbers(out)) == 3 and numbers(out) == numbers(in_one_process)
    assert losses(out) == losses(in_one_process)
    assert json.loads((out / "bench.json").read_text())["hardware"]["threads"] == 1
    assert not (tmp_path / ".ray").exists()  # no access token is left behind


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
print(cluster.address, second.all_processes["raylet"][0].process.pid, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Start a cluster of two nodes with one worker per node.

    Yield the address of the cluster and the process of the second node.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # other hosts must not join the cluster
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    command, pipe = [sys.executable, "-c", TWO_NODES], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as cluster:
        yield cluster.stdout.readline().split()


def test_run_is_bit_identical_after_node_loss(sequential_run, two_nodes, tmp_path):
    out, (address, second) = tmp_path / "run", two_nodes
    options = ["--cluster", f"address={address}"]
    bench = start(out, "hgp", *ON_RAY, *options, python=sys.executable)
    wait_until(lambda: busy_workers(int(second)), bench)
    for process in process_tree(int(second)):
        os.kill(process, signal.SIGKILL)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert stderr.count("a worker died") == 1 and "Traceback" not in stderr
    in_one_process = sequential_run("hgp")
    assert len(numbers(out)) == 1 and numbers(out) == numbers(in_one_process)
    assert losses(out) == losses(in_one_process)


def test_killed_command_resumes_bit_identically(sequential_run, tmp_path):
    """Compare a resumed run with a run in one process.

    The server saves control variates and low-rank pairs.
    """
    out, options = tmp_path / "run", ["--local", "scaffold"]
    bench = start(out, "hgp", *options, *ON_RAY)
    wait_until(lambda: list(out.rglob("checkpoint.safetensors")), bench)
    bench.kill()
    wait_for(bench)
    code, stderr = wait_for(start(out, "hgp", *options, *ON_RAY))
    assert code == 0, stderr
    in_one_process = sequential_run("hgp", *options)
    assert numbers(out) == numbers(in_one_process)
    assert losses(out) == losses(in_one_process)


def test_cluster_too_small_for_worker_is_rejected(tmp_path):
    """Reject a cluster that is too small for one worker, in one line."""
    words = [*ON_RAY, "--cluster", "threads=4000"]
    code, stderr = wait_for(start(tmp_path / "run", "fedncm", *words))
    assert code == 1
    assert "too few for one worker" in stderr
    assert "Traceback" not in stderr


def test_execution_config_selects_sequential_or_cluster_mode():
    """Execute runs in this process, one after another, if Ray distributes their clients."""
    spread = ExecutionConfig(
        executor="ray", cluster=(("spread", "clients"), ("threads", "3")), jobs=8
    )
    runs = ExecutionConfig(executor="ray", cluster=(("spread", "runs"),))
    assert spread.sequential
    assert not spread.on_cluster
    assert spread.threads == 3
    assert runs.on_cluster
    assert not runs.sequential
    assert ExecutionConfig().sequential
    assert not ExecutionConfig(jobs=2).sequential
