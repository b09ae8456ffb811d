"""Output that goes away does not end a run."""

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
def test_a_run_is_complete_without_its_streams(ending, tmp_path):
    python = sys.executable if "|" in ending else warm_python()  # which has its own last flush
    command = f"set -o pipefail; {python} {RUN.format(tmp_path / 'out')} {FEW} {ending}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()
    assert "task 5 of 5" in (tmp_path / "out" / "log.txt").read_text()


def test_a_hangup_does_not_end_a_run(tmp_path):
    """Finish a run after the signal that the session of a closed terminal sends in its middle."""
    command = [warm_python(), *RUN.format(tmp_path / "out").split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr
        assert any(b"task 1 of 5" in line for line in run.stderr)
        run.stderr.close()
        run.send_signal(signal.SIGHUP)
        assert run.wait(timeout=300) == 0
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()


def test_streams_that_are_closed_or_missing_are_no_terminals(tmp_path):
    file = (tmp_path / "file").open("w")
    file.close()
    assert not is_terminal(file) and not is_terminal(None)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_run_is_complete_after_its_terminal_is_closed(tmp_path):
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
