"""Test that runs finish when their output streams are closed or the disk is full."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fczoo.core.terminal import is_terminal
from helpers_warm import warm_python

RUN = "-m fczoo bench --methods fedncm --dataset digits --rounds 1 --jobs 1 --out {}"
FEW = "--train-per-class 8 --test-per-class 4"
FULL_DISK = (
    "cannot write stdout: No space left on device; free some space, or write to another disk"
)


@pytest.mark.parametrize("ending", ["2>&-", ">&-", ">&- 2>&-", "2>&1 | true"])
def test_run_finishes_without_output_streams(ending, tmp_path):
    python = (
        sys.executable if "|" in ending else warm_python()
    )  # warm_python flushes by itself at exit
    command = f"set -o pipefail; {python} {RUN.format(tmp_path / 'out')} {FEW} {ending}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()
    assert "task 5 of 5" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device that is full")
@pytest.mark.parametrize(
    ("arguments", "ending", "code", "message"),
    [
        ("list datasets", ">/dev/full", 1, FULL_DISK),
        ("list datasets --no-such-option", ">/dev/full", 2, "no such option --no-such-option"),
        ("list datasets", "2>/dev/full", 0, ""),
        ("list datasets", "| head -1 >/dev/null", 0, ""),
        ("list datasets", ">&-", 0, ""),
    ],
)
def test_full_disk_is_one_line_and_closed_pipe_is_silent(arguments, ending, code, message):
    """Unlike a reader that stops reading, a full disk loses output that someone waits for."""
    command = f"set -o pipefail; {sys.executable} -m fczoo {arguments} {ending}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert (process.returncode, message in process.stderr) == (code, True), process.stderr
    assert process.stderr.count("\n") == bool(message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device that is full")
def test_run_whose_output_is_lost_is_complete(tmp_path):
    run = f"{sys.executable} {RUN.format(tmp_path / 'out')} {FEW} >/dev/full"
    process = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=300)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == f"Error: {FULL_DISK}"
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()


def test_run_ignores_hangup_signal(tmp_path):
    """Finish a run that receives SIGHUP in its first task."""
    command = [warm_python(), *RUN.format(tmp_path / "out").split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr
        assert any(b"task 1 of 5" in line for line in run.stderr)
        run.stderr.close()
        run.send_signal(signal.SIGHUP)
        assert run.wait(timeout=300) == 0
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()


def test_closed_or_missing_streams_are_not_terminals(tmp_path):
    file = (tmp_path / "file").open("w")
    file.close()
    assert not is_terminal(file) and not is_terminal(None)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_run_finishes_after_terminal_is_closed(tmp_path):
    ours, theirs = os.openpty()
    run = subprocess.Popen(
        [warm_python(), *RUN.format(tmp_path / "out").split(), *FEW.split()],
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.close(ours)
    assert run.wait(timeout=300) == 0
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()
