"""Compare ``--executor slurm`` and ``ray`` with sequential runs, also after kills and requeues.

The tests of Slurm start a cluster of two nodes on this machine. They need Debian's slurm-wlm and
munge.
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
    """Start a Slurm cluster of two nodes and yield the environment variables for it."""
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
    """Wait until a run of this folder has saved a round, and return its Slurm job."""
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
def sequential_numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("turn") / "run"
    code, stderr = wait_for(start(out, "fedncm,hgp", *TINY))
    assert code == 0, stderr
    return numbers(out)


@pytest.mark.slow
@needs_slurm
def test_slurm_jobs_match_sequential_runs(slurm, sequential_numbers, tmp_path):
    out = tmp_path / "run"
    code, stderr = wait_for(
        start(out, "fedncm,hgp", *TINY, "--executor", "slurm", env=slurm, python=sys.executable)
    )
    assert code == 0, stderr
    assert len(sequential_numbers) == 2 and numbers(out) == sequential_numbers
    assert len(list((out / ".cluster").glob("*/*_submission.sh"))) == 2


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "how", [["scancel"], ["scontrol", "requeue"], ["scancel", "--signal=USR2"]]
)
def test_cancelled_or_requeued_slurm_job_resumes(slurm, tmp_path, how):
    bench = start(
        tmp_path / "run", "hgp", *LONG, "--executor", "slurm", env=slurm, python=sys.executable
    )
    subprocess.run([*how, running_job(slurm, tmp_path / "run")], env=slurm, check=True)
    code, stderr = wait_for(bench)
    assert code == 0, stderr
    assert stderr.count("its process died; restarting the run") == (how == ["scancel"])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("task 2 of 2") == 1 and len(numbers(tmp_path / "run")) == 1


@pytest.mark.slow
@needs_slurm
def test_slurm_jobs_save_round_on_sigterm(slurm, tmp_path):
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
def test_invalid_slurm_option_is_rejected(slurm, tmp_path):
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
def test_rejected_slurm_job_is_recorded(slurm, tmp_path):
    """Record a rejected job and exit with an error, also with --skip-failed."""
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
def test_pending_slurm_job_reports_reason(slurm, tmp_path):
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
def test_missing_slurm_is_reported(tmp_path):
    pytest.importorskip("submitit", reason="needs submitit")
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    code, stderr = wait_for(
        start(tmp_path / "run", "fedncm", *TINY, "--executor", "slurm", env=env)
    )
    assert code == 1
    assert "Slurm does not answer on this machine" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ray_tasks_match_sequential_runs_after_restart(sequential_numbers, tmp_path):
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
    assert has_killed and stderr.count("its process died; restarting the run") == 1
    assert numbers(tmp_path / "run") == sequential_numbers


@pytest.mark.slow
def test_unusable_ray_cluster_option_is_rejected(tmp_path):
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
def test_ray_address_of_other_service_is_rejected(tmp_path, monkeypatch):
    """Reject the address of a service that is not Ray, in one line.

    Ray itself would retry forever, so the test shortens the timeout.
    """
    pytest.importorskip("ray", reason="needs Ray")
    monkeypatch.setattr("fczoo.runner.executors.ray.CONNECT_TIMEOUT", 3.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http_server:
        Thread(target=http_server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{http_server.server_port}"
        words = ["--executor", "ray", "--cluster", f"address={address}"]
        out = ["--out", str(tmp_path / "run")]
        outcome = CliRunner().invoke(main, ["bench", "--methods", "fedncm", *TINY, *words, *out])
        http_server.shutdown()
    (line,) = (line for line in outcome.stderr.splitlines() if line.startswith("Error"))
    assert outcome.exit_code == 1
    assert f"no Ray cluster answers at {address}: the process on this port did not answer" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "executor", "says"),
    [
        (["threads=2"], "cores", "--cluster needs --executor slurm or ray"),
        (["threads"], "ray", "write KEY=VALUE"),
        (["threads=0"], "ray", "threads is '0'"),
        (["threads=x"], "slurm", "threads is 'x'"),
    ],
)
def test_invalid_cluster_option_is_rejected(given, executor, says):
    with pytest.raises(FczooError, match="--cluster") as error:
        parse_cluster(given, executor)
    assert says in str(error.value)
    assert parse_cluster(["a=b=c", "threads=2"], "ray") == (("a", "b=c"), ("threads", "2"))


def test_unknown_executor_suggests_nearest_name():
    with pytest.raises(FczooError, match="slurm"):
        parse_executor("slrum")


def test_node_with_other_environment_is_rejected(tmp_path, monkeypatch):
    """Reject a node with another library version, source or device before anything runs."""
    from fczoo.federation.settings import Settings
    from fczoo.reports.run_folder import read_bench_file, write_bench_file
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
    about = read_bench_file(run.folder).plain()
    new_about = {
        **about,
        "device": "cuda",
        "versions": {**about["versions"], "torch": "1.0"},
        "code": {**about["code"], "fczoo.core.method": "0" * 64},
    }
    write_bench_file(run.folder, new_about)
    with pytest.raises(FczooError) as error:
        check_node(run)
    message = str(error.value)
    assert "torch is" in message and "1.0 where the command was started" in message
    assert "need device cuda, this node would use cpu" in message
    assert "fczoo.core.method differs" in message
