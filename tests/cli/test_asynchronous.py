"""Test ``--moving`` and ``--task-order`` on the command line: bench, partition, errors."""

import csv
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.data.partition import load_partition

SMALL = shlex.split(
    "--train-per-class 20 --test-per-class 10 --clients 3 --tasks 3 --partition iid"
)
BENCH = [
    *shlex.split("bench --methods fedncm,fedavg --set fedavg.tune=head --rounds 2 --epochs 1"),
    *SMALL,
]


def invoke(*words: str, code: int = 0) -> str:
    """Run a command; return what it prints.

    Args:
        words: Words of the command.
        code: The exit code that it must have; an error must be one line.
    """
    outcome = CliRunner().invoke(main, [*words])
    assert outcome.exit_code == code, outcome.output
    assert not code or (
        outcome.stderr.startswith("Error: ") and len(outcome.stderr.splitlines()) == 1
    )
    return outcome.output


def result(out: Path, method: str = "fedavg") -> dict:
    return json.loads((out / method / "seed0" / "result.json").read_text())


def test_staged_bench_resumes_and_repeats_with_same_result(tmp_path: Path) -> None:
    """Run, resume and repeat a bench in stages.

    Three clients move, two at a time: tasks 000, 110, 211, 222.
    """
    out, again = tmp_path / "out", tmp_path / "again"
    output = invoke(*BENCH, "--moving", "2", "--out", str(out), "--diagnostics")
    assert (
        "digits: 3 tasks in 4 stages of 4 to 10 classes, 200 training (20 per class) and 100 "
        "test images" in output
    )
    assert "3 clients, 2 continue to their next task at each stage, iid" in output
    first_result = result(out)
    assert first_result["task_sizes"] == [4, 7, 10, 10]
    assert first_result["test_counts"] == [40, 30, 30, 0]
    assert [len(row) for row in first_result["accuracy"]] == [1, 2, 3, 4]
    (out / "fedavg" / "seed0" / "result.json").unlink()
    invoke("bench", "--resume", "--out", str(out))
    assert result(out)["metrics"] == first_result["metrics"]
    arguments = [
        f"file:{out / 'partition.json'}" if argument == "iid" else argument for argument in BENCH
    ]
    invoke(*arguments, "--moving", "2", "--out", str(again))
    assert result(again)["metrics"] == first_result["metrics"]
    assert result(again)["partition"]["sha256"] == first_result["partition"]["sha256"]
    invoke("report", str(out), "--html", str(tmp_path / "page.html"))


def test_partition_command_reports_staged_split(tmp_path: Path) -> None:
    words = ["partition", *SMALL, "--moving", "1", "--task-order", "own"]
    table, partition_file = tmp_path / "t.csv", tmp_path / "p.json"
    output = invoke(
        *words,
        "--table",
        str(table),
        "--save",
        str(partition_file),
        "--export",
        str(tmp_path / "e.json"),
    )
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 7 and {row[-2] for row in rows} == {"0"}  # unassigned images
    assert (
        sum(int(row[2]) for row in rows) == 200
    )  # each image in the stage in which it is first met
    assert load_partition(partition_file).counts().shape == (7, 3)
    with table.open() as file:
        assert {row["task"] for row in csv.DictReader(file)} == {*"0123456"}


def test_dry_run_of_staged_bench_lists_moving() -> None:
    output = invoke("bench", "--methods", "fedncm", *SMALL, "--moving", "2", "--dry-run")
    assert "moving" in output and "= " in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--methods", "pilora", "--moving", "2"],
            "labels that return in later tasks (--tasks domains, --blurry, --moving or --task",
        ),
        (
            ["--methods", "lwf", "--task-order", "own"],
            "lwf does not support labels that return in later tasks",
        ),
        (
            ["--methods", "fedncm", "--moving", "3"],
            "--moving 3 must be below the number of clients, 3",
        ),
        (["--methods", "fedncm", "--moving", "1", "--joining", "1"], "leave out --joining"),
        (["--methods", "fedncm", "--moving", "0"], "--moving is 0; it must be at least 1"),
    ],
)
def test_invalid_staged_options_are_rejected(words: list[str], says: str, tmp_path: Path) -> None:
    assert says in invoke("bench", *SMALL, *words, "--out", str(tmp_path / "out"), code=1)
