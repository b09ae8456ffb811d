"""``--executor slurm`` and ``ray``: numbers of sequential runs, also after deaths and requeues.

Slurm's tests start a cluster of two nodes on this machine, where Debian's slurm-wlm and munge are
installed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.cli.arguments import parse_cluster, parse_executor
from fczoo.core.errors import FczooError
from helpers_bench import holders, numbers, start, wait_for
from helpers_cli import TINY

LONG = ["--train-per-class", "30", "--rounds", "4", "--epochs", "2", "--tasks", "2"]
START = Path(__file__).parent.parent / "end_to_end" / "slurm_here.sh"
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
    reason="needs root and Debian's slurm-wlm and munge",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Slurm cluster of two nodes, and return the environment in which it is found."""
    pytest.importorskip("submitit", reason="needs submitit")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):
        parent.chmod(parent.stat().st_mode | 0o055)  # munged runs as its own user
    subprocess.run([str(START), "start", str(folder)], check=True, capture_output=True)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    for _ in range(60):
        nodes = subprocess.run(
            ["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True
        )
        if nodes.stdout.split() == ["idle"]:
            break
        time.sleep(0.5)
    yield environment  # for real interpreters, since Slurm itself signals the processes of a job
    subprocess.run([str(START), "stop", str(folder)], check=True, capture_output=True)


def running_job(env: dict[str, str], out: Path) -> str:
    """Return a job of this run folder, once its run has saved a round."""
    for _ in range(1200):
        if list(out.rglob("checkpoint.safetensors")):
            queue = subprocess.run(
                ["squeue", "-h", "-t", "R", "-o", "%A"], env=env, capture_output=True, text=True
            )
            if queue.stdout.split():
                return queue.stdout.split()[0]
        time.sleep(0.1)
    raise AssertionError("no job saved a round")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("turn") / "run"
    code, stderr = wait_for(start(out, "fedncm,hgp", *TINY))
    assert code == 0, stderr
    return numbers(out)


@pytest.mark.slow
@needs_slurm
def test_jobs_of_slurm_give_the_numbers_of_runs_in_turn(slurm, in_turn, tmp_path):
    out = tmp_path / "run"
    code, stderr = wait_for(
        start(out, "fedncm,hgp", *TINY, "--executor", "slurm", env=slurm, python=sys.executable)
    )
    assert code == 0, stderr
    assert len(in_turn) == 2 and numbers(out) == in_turn
    assert len(list((out / ".cluster").glob("*/*_submission.sh"))) == 2


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "how", [["scancel"], ["scontrol", "requeue"], ["scancel", "--signal=USR2"]]
)
def test_a_job_that_slurm_ends_or_requeues_goes_on_after_its_last_round(slurm, tmp_path, how):
    bench = start(
        tmp_path / "run", "hgp", *LONG, "--executor", "slurm", env=slurm, python=sys.executable
    )
    subprocess.run([*how, running_job(slurm, tmp_path / "run")], env=slurm, check=True)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert stderr.count("its process died; restarting it") == (how == ["scancel"])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("task 2 of 2") == 1 and len(numbers(tmp_path / "run")) == 1


@pytest.mark.slow
@needs_slurm
def test_told_to_stop_the_jobs_save_their_round(slurm, tmp_path):
    bench = start(
        tmp_path / "run", "hgp", *LONG, "--executor", "slurm", env=slurm, python=sys.executable
    )
    running_job(slurm, tmp_path / "run")
    bench.send_signal(signal.SIGTERM)
    code, stderr = wait_for(bench)
    assert code == 128 + signal.SIGTERM and "Traceback" not in stderr, stderr
    squeue = ["squeue", "-h", "-o", "%A"]
    for _ in range(20):  # Slurm takes a moment to see that a job's process has ended
        queue = subprocess.run(squeue, env=slurm, capture_output=True, text=True).stdout.split()
        if not queue:
            break
        time.sleep(1)
    assert not queue
    assert list((tmp_path / "run").rglob("checkpoint.safetensors"))


@pytest.mark.slow
@needs_slurm
def test_what_slurm_does_not_take_is_one_line(slurm, tmp_path):
    for value, says in {
        "colour=red": "--cluster for Slurm",
        "slurm_partition=none": "Slurm rejected the job",
    }.items():
        bench = start(
            tmp_path / value[:3],
            "fedncm",
            *TINY,
            "--executor",
            "slurm",
            "--cluster",
            value,
            env=slurm,
            python=sys.executable,
        )
        code, stderr = wait_for(bench)
        lines = [line for line in stderr.splitlines() if line.startswith("Error")]
        assert code == 1
        assert len(lines) == 1
        assert says in lines[0]
        assert "Traceback" not in stderr


@pytest.mark.slow
@needs_slurm
def test_a_job_that_is_not_taken_is_recorded_and_others_go_on(slurm, tmp_path):
    """With --skip-failed, too, the table and the exit code show a job that is not taken."""
    words = ["--executor", "slurm", "--cluster", "slurm_partition=none", "--skip-failed"]
    code, stderr = wait_for(
        start(tmp_path / "run", "fedncm", *TINY, *words, env=slurm, python=sys.executable)
    )
    record = json.loads((tmp_path / "run" / "fedncm" / "seed0" / "failed.json").read_text())
    assert code == 1
    assert "Slurm rejected the job" in record["error"]
    assert "Traceback" not in stderr


@pytest.mark.slow
@needs_slurm
def test_why_a_job_does_not_start_is_said(slurm, tmp_path):
    words = ["--executor", "slurm", "--cluster", "timeout_min=600"]  # the partition gives 300
    bench = start(tmp_path / "run", "fedncm", *TINY, *words, env=slurm, python=sys.executable)
    first_lines = ""
    while "does not start" not in first_lines and bench.poll() is None:
        first_lines += bench.stderr.readline()
    assert "PartitionTimeLimit" in first_lines
    bench.send_signal(signal.SIGTERM)
    code, stderr = wait_for(bench)
    assert code == 128 + signal.SIGTERM and "Traceback" not in stderr, stderr


@pytest.mark.slow
def test_without_slurm_it_is_one_line(tmp_path):
    pytest.importorskip("submitit", reason="needs submitit")
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    code, stderr = wait_for(
        start(tmp_path / "run", "fedncm", *TINY, "--executor", "slurm", env=env)
    )
    assert code == 1
    assert "no Slurm answers here" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tasks_of_ray_give_the_numbers_of_runs_in_turn_and_one_that_dies_is_begun_again(
    in_turn, tmp_path
):
    pytest.importorskip("ray", reason="needs Ray")
    options = {"env": dict(os.environ), "python": sys.executable}  # Ray needs a fresh interpreter
    bench = start(tmp_path / "run", "fedncm,hgp", *TINY, "--executor", "ray", **options)
    has_killed = False
    while bench.poll() is None and not has_killed:
        for process in holders(tmp_path / "run" / "hgp", "/rounds.jsonl"):
            os.kill(process, signal.SIGKILL)
            has_killed = True
        time.sleep(0.05)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert has_killed and stderr.count("its process died; restarting it") == 1
    assert numbers(tmp_path / "run") == in_turn


@pytest.mark.slow
def test_a_ray_cluster_that_does_not_answer_is_one_line(tmp_path):
    pytest.importorskip("ray", reason="needs Ray")
    for value, says in {
        "address=127.0.0.1:1": "no Ray cluster answers at 127.0.0.1:1",
        "colour=red": "takes address, threads, gpus and spread; not colour",
        "gpus=half": "gpus is 'half'",
        "spread=cells": "spread is 'cells'",
    }.items():
        words = ["--executor", "ray", "--cluster", value]
        code, stderr = wait_for(
            start(tmp_path / value[:3], "fedncm", *TINY, *words, env=dict(os.environ))
        )
        assert code == 1
        assert says in stderr
        assert "Traceback" not in stderr
        assert not (tmp_path / value[:3]).exists()


@pytest.mark.slow
def test_a_ray_address_where_something_else_listens_is_one_line(tmp_path, monkeypatch):
    """Refuse in one line an address where something else listens.

    Ray itself would continue trying without end, so the wait for it may be short here.
    """
    pytest.importorskip("ray", reason="needs Ray")
    monkeypatch.setattr("fczoo.runner.executors.ray.ANSWER", 3.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http_server:
        Thread(target=http_server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{http_server.server_port}"
        words = ["--executor", "ray", "--cluster", f"address={address}"]
        out = ["--out", str(tmp_path / "run")]
        outcome = CliRunner().invoke(main, ["bench", "--methods", "fedncm", *TINY, *words, *out])
        http_server.shutdown()
    (line,) = (line for line in outcome.stderr.splitlines() if line.startswith("Error"))
    assert outcome.exit_code == 1
    assert f"no Ray cluster answers at {address}: the program there did not answer" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "executor", "says"),
    [
        (["threads=2"], "cores", "--cluster is given without --executor"),
        (["threads"], "ray", "write KEY=VALUE"),
        (["threads=0"], "ray", "threads is '0'"),
        (["threads=x"], "slurm", "threads is 'x'"),
    ],
)
def test_words_of_cluster_that_cannot_be(given, executor, says):
    with pytest.raises(FczooError, match="--cluster") as error:
        parse_cluster(given, executor)
    assert says in str(error.value)
    assert parse_cluster(["a=b=c", "threads=2"], "ray") == (("a", "b=c"), ("threads", "2"))


def test_an_unknown_executor_names_the_nearest():
    with pytest.raises(FczooError, match="slurm"):
        parse_executor("slrum")


def test_a_node_that_differs_is_refused_by_name(tmp_path, monkeypatch):
    """Refuse a node with other library version, source or device, by name, before anything runs."""
    from fczoo.federation.settings import Settings
    from fczoo.reports.run_folder import read_about, write_about
    from fczoo.runner.configs import RunSpec, make_sweep
    from fczoo.runner.executors import check_node
    from fczoo.runner.sweep import run_sweep

    settings = Settings(
        tasks=2, rounds=1, epochs=1, train_per_class=5, test_per_class=5, device="cpu"
    )
    sweep = make_sweep(Path(), settings, ["fedncm"])
    run_sweep(sweep, tmp_path / "run")
    run = RunSpec(sweep[Path()][0], tmp_path / "run")
    check_node(run)
    about = read_about(run.folder).plain()
    new_about = {
        **about,
        "device": "cuda",
        "versions": {**about["versions"], "torch": "1.0"},
        "code": {**about["code"], "fczoo.core.method": "0" * 64},
    }
    write_about(run.folder, new_about)
    with pytest.raises(FczooError) as error:
        check_node(run)
    message = str(error.value)
    assert "torch is" in message and "1.0 where the command was started" in message
    assert "need device cuda, this node would use cpu" in message
    assert "fczoo.core.method differs" in message
