"""Test that resumed runs equal uninterrupted ones and that invalid resumes are rejected."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fczoo import FczooError
from fczoo.core.errors import InterruptedCommandError
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.settings import Settings
from fczoo.runner.configs import ExecutionConfig, make_sweep
from fczoo.runner.resume_checks import check_same
from fczoo.runner.run_control import Interrupts, lock_folder
from fczoo.runner.sweep import run_sweep
from helpers_cli import TINY
from helpers_resume import Crash, crash_after, rounds, run_and_record, timeless
from helpers_warm import warm_python


def test_unsaved_rounds_are_logged_once(make_bench, small_method, tmp_path):
    bench, method, path = make_bench(), small_method("fcilpt"), tmp_path / "checkpoint.safetensors"
    with pytest.raises(Crash):
        run_and_record(bench, method, tmp_path, Checkpoint(path, crash_after(2)))
    with (tmp_path / "rounds.jsonl").open("a") as log:
        log.write('{"task": 1, "round": 0, "loss": 0.3}\n{"task": 1, "rou')
    run_and_record(bench, method, tmp_path, Checkpoint(path))
    assert [(r["task"], r["round"]) for r in rounds(tmp_path)] == [
        (t, r) for t in range(3) for r in range(2)
    ]


def test_log_shorter_than_checkpoint_is_rejected(make_bench, small_method, tmp_path):
    bench, method, path = make_bench(), small_method("fcilpt"), tmp_path / "checkpoint.safetensors"
    with pytest.raises(Crash):
        run_and_record(bench, method, tmp_path, Checkpoint(path, crash_after(2)))
    (tmp_path / "rounds.jsonl").write_text("")
    with pytest.raises(FczooError, match="fewer rounds than the checkpoint"):
        run_and_record(bench, method, tmp_path, Checkpoint(path))


# --- the file


# --- the folder


SMALL = {
    "train_per_class": 8,
    "test_per_class": 4,
    "rounds": 2,
    "epochs": 1,
    "tasks": 2,
    "clients": 2,
}


def run_small_sweep(out: Path, options=None, **changes):
    return run_sweep(sweep(options, **changes), out)


def sweep(options=None, **changes):
    settings = Settings.for_dataset("digits", **{**SMALL, **changes})
    return make_sweep(Path(), settings, ["fedncm"], options=options)


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("grid") / "run"
    run_small_sweep(out)
    return out


def test_finished_sweep_is_not_run_again(finished_sweep):
    result = finished_sweep / "fedncm" / "seed0" / "result.json"
    mtime = result.stat().st_mtime_ns
    assert (
        run_small_sweep(finished_sweep) == ([finished_sweep], 0)
        and result.stat().st_mtime_ns == mtime
    )


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"epochs": 2}, {}, "settings.epochs was 1, is 2"),
        ({"partition_seed": 5}, {}, "partition.sha256 was"),
        ({"train_per_class": 9}, {}, "data.sha256 was"),
        ({}, {"fedncm": {"distance": "cosine"}}, "methods.fedncm.distance was euclid, is cosine"),
    ],
)
def test_changed_configuration_is_rejected(finished_sweep, changes, options, named):
    with pytest.raises(FczooError, match="already in use by another configuration") as error:
        run_small_sweep(finished_sweep, options, **changes)
    message = str(error.value)
    assert named in message
    assert "\n" not in message
    assert len(message) < 600
    hashes = message.partition("sha256 was ")[2]
    assert (
        "settings." not in hashes and "methods." not in hashes
    )  # given options are named before derived hashes


@pytest.mark.parametrize("part", ["backbone.sha256", "data.sha256", "versions.torch", "device"])
def test_changed_environment_is_rejected(finished_sweep, tmp_path, part):
    about = json.loads((finished_sweep / "bench.json").read_text())
    section, _, name = part.partition(".")
    new_about = {**about, section: {**about[section], name: "0"} if name else "0"}
    check_same(finished_sweep, about, {**about, "started": "later", "command": [], "hardware": {}})
    with pytest.raises(FczooError, match=f"{part} was .*, is 0"):
        check_same(finished_sweep, about, new_about)


def test_changed_code_needs_acceptance(tmp_path):
    """Require a flag if code that a run uses has changed.

    The file of the method changes; changes in another method are ignored.
    """
    out, environment = tmp_path / "run", {"PYTHONPATH": str(tmp_path), **os.environ}
    for name in ("aside", "other"):
        source = (
            f'@register_method("{name}")\nclass M(FedNCM):\n    "One more of fedncm."\n    about '
            '= "x"\n'
        )
        imports = (
            "from fczoo.baselines.fedncm import FedNCM\nfrom fczoo.core.registry import "
            "register_method\n"
        )
        (tmp_path / f"{name}_plugin.py").write_text(f"{imports}\n\n{source}")
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "entry_points.txt").write_text(
            f"[fczoo.plugins]\n{name} = {name}_plugin\n"
        )

    def bench(*more: str) -> subprocess.CompletedProcess[str]:
        words = ["bench", "--methods", "aside", "--out", str(out), *TINY, *more]
        command = [warm_python(), "-m", "fczoo", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )

    assert bench().returncode == 0
    with (tmp_path / "other_plugin.py").open("a") as file:
        file.write("NO_RUN_USES = 1\n")
    assert bench().returncode == 0
    with (tmp_path / "aside_plugin.py").open("a") as file:
        file.write("A_RUN_USES = 1\n")
    process = bench()
    assert process.returncode == 1 and process.stderr.count("\n") == 1
    assert f"started with other code: {tmp_path / 'aside_plugin.py'};" in process.stderr
    assert bench("--accept-changed-code", "--seeds", "0,1").returncode == 0
    about = json.loads((out / "bench.json").read_text())
    assert [change["modules"] for change in about["changed_code"]] == [["aside_plugin"]]
    assert "fczoo.baselines.fedncm" in about["code"]
    assert "fczoo.baselines.ewc" not in about["code"]
    codes = [
        json.loads((out / "aside" / f"seed{s}" / "result.json").read_text())["versions"]["code"]
        for s in (0, 1)
    ]
    assert codes[0] != codes[1]
    assert bench().returncode == 0  # the accepted change is remembered


def test_foreign_folder_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FczooError, match="exists and is not a run folder"):
        run_small_sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_without_run_is_rejected(tmp_path):
    with pytest.raises(FczooError, match="no run to resume"):
        run_sweep(sweep(), tmp_path / "run", ExecutionConfig(resume=True))
    assert not list(tmp_path.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from fczoo.runner.configs import ExecutionConfig, make_sweep
from fczoo.runner.run_control import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_killed_process_releases_folder_lock(tmp_path):
    out = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FczooError, match="another process is running"):
            run_small_sweep(out)
        assert holder.poll() is None  # rejected while the other process still holds the folder
    finally:
        holder.kill()
        holder.wait()
    with lock_folder(out):
        pass


def test_run_held_by_worker_is_not_restarted(tmp_path):
    """Allow one process per run.

    Workers lock the folder of their run, also after their command was killed.
    """
    run_small_sweep(tmp_path)
    run = tmp_path / "fedncm" / "seed0"
    (run / "result.json").unlink()
    with lock_folder(run), pytest.raises(FczooError, match="another process"):
        run_small_sweep(tmp_path)
    run_small_sweep(tmp_path)
    assert (run / "result.json").is_file()


def test_empty_folder_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


# --- stop requests


def test_second_signal_stops_at_once(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with Interrupts(tmp_path) as interrupts:
        interrupts.check_interrupt()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(InterruptedCommandError, match=f"--out {tmp_path}") as error:
            interrupts.check_interrupt()
        assert error.value.exit_code == 130
        with pytest.raises(InterruptedCommandError, match="at once") as error:
            signal.raise_signal(signal.SIGTERM)
        assert error.value.exit_code == 143
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_process_resumes_with_equal_results(tmp_path, number, code):
    command = shutil.which("fczoo", path=str(Path(sys.executable).parent))
    out, checkpoint = (
        tmp_path / "run",
        tmp_path / "run" / "fedavg" / "seed0" / "checkpoint.safetensors",
    )
    words = [
        command,
        "bench",
        "--methods",
        "fedavg",
        "--set",
        "fedavg.tune=head",
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    words += [
        w for k, v in {**SMALL, "rounds": 40}.items() for w in (f"--{k.replace('_', '-')}", str(v))
    ]
    run = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while not checkpoint.exists() and run.poll() is None:
        time.sleep(0.005)
    run.send_signal(number)
    stderr = run.communicate(timeout=100)[1]
    assert run.returncode == code, stderr
    if number == signal.SIGINT:
        assert stderr.splitlines()[-1].startswith("Error: stopped on request")
        assert f"--out {out}" in stderr
    assert (
        not (out / "fedavg" / "seed0" / "result.json").exists()
        or not json.loads((out / "fedavg" / "seed0" / "result.json").read_text())["finished"]
    )
    settings = Settings.for_dataset("digits", **{**SMALL, "rounds": 40, "device": "cpu"})
    runs = make_sweep(Path(), settings, ["fedavg"], options={"fedavg": {"tune": "head"}})
    run_sweep(runs, out, ExecutionConfig(resume=True))
    run_sweep(runs, tmp_path / "unhurt")
    assert rounds(out / "fedavg" / "seed0") == rounds(tmp_path / "unhurt" / "fedavg" / "seed0")
    for name in ("result.json", "partition.json"):
        one, two = (next(f.rglob(name)).read_text() for f in (out, tmp_path / "unhurt"))
        assert timeless(json.loads(one)) == timeless(json.loads(two))
    assert not checkpoint.exists()
