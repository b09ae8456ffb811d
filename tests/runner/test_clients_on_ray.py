"""``--executor ray --cluster spread=clients``: the numbers of one process, whatever dies on the way."""

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
from fczoo.runner.cell import Conduct
from helpers_bench import ended, numbers

pytest.importorskip("ray", reason="needs Ray")
pytestmark = pytest.mark.slow
SMALL = ["--train-per-class", "8", "--test-per-class", "5", "--tasks", "2", "--rounds", "2", "--epochs", "1"]
SMALL += ["--clients", "20"]  # so many that a worker is asked for two at a time
ON_RAY = ["--executor", "ray", "--cluster", "spread=clients", "--jobs", "2"]


def start(out: Path, methods: str, *options: str) -> subprocess.Popen[str]:
    """A bench whose home is beside its run folder."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(out.parent)}
    return helpers_bench.start(out, methods, *SMALL, *options, env=env)


def losses(out: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(out.rglob("rounds.jsonl")) for line in file.open()]
    return [(line["task"], line["round"], line["loss"], line["bytes_up"]) for line in lines]


def family(process: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return [process]
    return [process, *(member for child in children for member in family(int(child)))]


def answering(process: int) -> list[int]:
    """The actors of a bench that are answering for clients; Ray says in their name what they do."""
    found = []
    for member in family(process):
        try:
            if b"Worker.answer" in Path(f"/proc/{member}/cmdline").read_bytes():
                found.append(member)
        except OSError:
            continue
    return found


def until(there: Callable[[], list], bench: subprocess.Popen) -> list:
    for _ in range(12000):
        if found := there():
            return found
        assert bench.poll() is None, bench.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("it never came")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run folder of runs in turn, in one process."""

    def run(methods: str, *options: str) -> Path:
        out = tmp_path_factory.mktemp("turn") / "run"
        code, said = ended(start(out, methods, *options))
        assert code == 0, said
        return out

    return run


def test_a_worker_that_dies_in_the_middle_of_a_round_changes_no_bit(in_turn, tmp_path):
    """Prompts, exemplars with a teacher, and sums of a survey alone."""
    methods, out = "l2p,icarl,fedridge", tmp_path / "run"
    bench = start(out, methods, *ON_RAY)
    (victim, *_) = until(lambda: answering(bench.pid), bench)
    os.kill(victim, signal.SIGKILL)
    code, said = ended(bench)
    assert code == 0, said
    assert "a worker died" in said and "Traceback" not in said
    expected = in_turn(methods)
    assert len(numbers(out)) == 3 and numbers(out) == numbers(expected)
    assert losses(out) == losses(expected)
    assert json.loads((out / "bench.json").read_text())["hardware"]["threads"] == 1
    assert not (tmp_path / ".ray").exists()  # no word of access is left behind


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
    """A cluster of this machine, a worker a node: its address, and the process of the second node."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # nobody else on the network may join it
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    command, pipe = [sys.executable, "-c", TWO_NODES], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as cluster:
        yield cluster.stdout.readline().split()


def test_a_node_that_is_lost_in_the_middle_of_a_round_changes_no_bit(in_turn, two_nodes, tmp_path):
    out, (address, second) = tmp_path / "run", two_nodes
    bench = start(out, "hgp", *ON_RAY, "--cluster", f"address={address}")
    until(lambda: answering(int(second)), bench)
    for process in family(int(second)):
        os.kill(process, signal.SIGKILL)
    code, said = ended(bench)
    assert code == 0, said
    assert said.count("a worker died") == 1 and "Traceback" not in said
    expected = in_turn("hgp")
    assert len(numbers(out)) == 1 and numbers(out) == numbers(expected)
    assert losses(out) == losses(expected)


def test_a_command_that_is_killed_goes_on_with_the_same_bits(in_turn, tmp_path):
    """Control variates and low-rank pairs, which are saved where the server is."""
    out, options = tmp_path / "run", ["--local", "scaffold"]
    bench = start(out, "hgp", *options, *ON_RAY)
    until(lambda: list(out.rglob("checkpoint.safetensors")), bench)
    bench.kill()
    ended(bench)
    code, said = ended(start(out, "hgp", *options, *ON_RAY))
    assert code == 0, said
    expected = in_turn("hgp", *options)
    assert numbers(out) == numbers(expected) and losses(out) == losses(expected)


def test_what_cannot_be_is_one_line(tmp_path):
    """A cluster without room for a worker; a word of --cluster that cannot be."""
    for value, says in {
        "threads=4000": "too few for one worker",
        "spread=rounds": "spread is 'rounds'",
    }.items():
        words = (
            [*ON_RAY, "--cluster", value] if "threads" in value else ["--executor", "ray", "--cluster", value]
        )
        code, said = ended(start(tmp_path / value[:3], "fedncm", *words))
        assert code == 1 and says in said and "Traceback" not in said


def test_who_goes_on_where():
    """Runs whose clients are spread go on here, in turn, and take this process's device."""
    spread = Conduct(executor="ray", cluster=(("spread", "clients"), ("threads", "3")), jobs=8)
    runs = Conduct(executor="ray", cluster=(("spread", "runs"),))
    assert spread.in_turn and not spread.away and spread.threads == 3
    assert runs.away and not runs.in_turn and Conduct().in_turn and not Conduct(jobs=2).in_turn
