"""Test that runs finish when their output streams are closed."""

import os
import signal
import subprocess
import sys

import pytest

from fczoo.core.terminal import is_terminal
from helpers_warm import warm_python

RUN = "-m fczoo bench --methods fedncm --dataset digits --rounds 1 --jobs 1 --out {}"
FEW = "--train-per-class 8 --test-per-class 4"


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
