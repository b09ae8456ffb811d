"""Output that goes away does not end a run."""

import os
import subprocess
import sys

import pytest

RUN = "-m fczoo bench --methods fedncm --dataset digits --rounds 1 --jobs 1 --out {}"


@pytest.mark.parametrize("ending", ["2>&-", ">&-", ">&- 2>&-", "2>&1 | true"])
def test_a_run_is_complete_without_its_streams(ending, tmp_path):
    command = f"set -o pipefail; {sys.executable} {RUN.format(tmp_path / 'out')} {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()
    assert "task 5 of 5" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_run_is_complete_after_its_terminal_is_closed(tmp_path):
    ours, theirs = os.openpty()
    run = subprocess.Popen(
        [sys.executable, *RUN.format(tmp_path / "out").split()], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.close(ours)
    assert run.wait(timeout=300) == 0
    assert (tmp_path / "out" / "fedncm" / "seed0" / "result.json").is_file()
