"""Test that equal warnings are merged into one line with count and places."""

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from helpers_cli import TINY
from helpers_warm import warm_python


def warnings_of(*arguments: str) -> list[str]:
    """Run a command that must succeed; return its warnings."""
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    return [line for line in outcome.stderr.splitlines() if line.startswith("WARNING")]


def test_repeated_warnings_are_merged_into_one_line() -> None:
    spec = "dirichlet:0.05,min_size=30,max_tries=1"
    (line,) = warnings_of("partition", "--partition", spec, "--tasks", "5", "--clients", "5")
    assert (
        "fewer than 30 images in each of 1 draws; images of the largest clients were moved to such "
        "clients (5 times: task 1; task 2; task 3 and 2 more)" in line
    )
    (line,) = warnings_of("partition", "--partition", spec, "--tasks", "1", "--clients", "5")
    assert line.endswith("were moved to such clients (task 1)")


def test_warning_reports_clients(tmp_path: Path) -> None:
    """Print a client's warnings while the run continues, above the line of the task."""
    run = [
        "bench",
        "--methods",
        "glfc",
        "--set",
        "glfc.memory=1",
        "--out",
        str(tmp_path / "run"),
        *TINY,
    ]
    outcome = CliRunner().invoke(main, [*run, "--tasks", "5"])
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stderr.splitlines()
    line_numbers = [
        i for i, line in enumerate(lines) if "has no room for one image of each" in line
    ]
    assert line_numbers
    assert (
        "it stores no exemplars (2 times: task 2, client 2; task 2, client 1)"
        in lines[line_numbers[0]]
    )
    assert any("task 5 of 5" in line for line in lines[line_numbers[0] :])


@pytest.mark.slow
def test_warnings_of_workers_are_merged(tmp_path: Path) -> None:
    run = [
        "bench",
        "--methods",
        "glfc",
        "--set",
        "glfc.memory=1",
        "--seeds",
        "0-1",
        "--jobs",
        "2",
        *TINY,
    ]
    command = [warm_python(), "-m", "fczoo", *run, "--tasks", "5", "--out", str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [
        line for line in process.stderr.splitlines() if "has no room for one image of each" in line
    ]
    assert lines, process.stderr
    assert all("it stores no exemplars (2 times: task 2, client " in line for line in lines), (
        process.stderr
    )
