"""Equal warnings are one line, with how often and where."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from helpers_cli import TINY


def warned(*arguments: str) -> list[str]:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return [line for line in done.stderr.splitlines() if line.startswith("WARNING")]


def test_a_warning_of_every_task_is_one_line() -> None:
    skewed = "dirichlet:0.05,min_size=30,max_tries=1"
    (line,) = warned("partition", "--partition", skewed, "--tasks", "5", "--clients", "5")
    assert (
        "below 30 images in 1 draws; the last draw was repaired (5 times: task 1; task 2; task 3 and 2 more)"
        in line
    )
    (line,) = warned("partition", "--partition", skewed, "--tasks", "1", "--clients", "5")
    assert line.endswith("was repaired (task 1)")


def test_clients_are_named(tmp_path: Path) -> None:
    """Their warnings are told while the run goes on, above the line of the task."""
    run = ["bench", "--methods", "glfc", "--set", "glfc.memory=1", "--out", str(tmp_path / "run"), *TINY]
    done = CliRunner().invoke(main, [*run, "--tasks", "5"])
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    told = [i for i, line in enumerate(lines) if "has no room for one image of each" in line]
    assert told and "none is kept (2 times: task 2, client 2; task 2, client 1)" in lines[told[0]]
    assert any("task 5 of 5" in line for line in lines[told[0] :])


@pytest.mark.slow
def test_workers_tell_theirs_alike(tmp_path: Path) -> None:
    run = ["bench", "--methods", "glfc", "--set", "glfc.memory=1", "--seeds", "0-1", "--jobs", "2", *TINY]
    command = [sys.executable, "-m", "fczoo", *run, "--tasks", "5", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if "has no room for one image of each" in line]
    assert told and all("none is kept (2 times: task 2, client " in line for line in told), done.stderr
