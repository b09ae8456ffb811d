"""``--moving`` and ``--task-order`` from the command line: a bench, its split, what is refused."""

import csv
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.data.partition import load_partition

SMALL = shlex.split("--train-per-class 20 --test-per-class 10 --clients 3 --tasks 3 --partition iid")
BENCH = [*shlex.split("bench --methods fedncm,fedavg --set fedavg.tune=head --rounds 2 --epochs 1"), *SMALL]


def invoke(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, [*words])
    assert done.exit_code == code, done.output
    assert not code or (done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1)
    return done.output


def result(out: Path, method: str = "fedavg") -> dict:
    return json.loads((out / method / "seed0" / "result.json").read_text())


def test_a_bench_in_stages(tmp_path: Path) -> None:
    """Three clients, two at a time: tasks 000, 110, 211, 222. It goes on, and can be had again."""
    out, again = tmp_path / "out", tmp_path / "again"
    said = invoke(*BENCH, "--moving", "2", "--out", str(out), "--diagnostics")
    assert (
        "digits: 4 stages of 3 tasks, of 4 to 10 classes, 200 training (20 per class) and 100 test images"
        in said
    )
    assert "3 clients, 2 of which go on to their next task at a time, iid" in said
    found = result(out)
    assert found["task_sizes"] == [4, 7, 10, 10] and found["test_counts"] == [40, 30, 30, 0]
    assert [len(row) for row in found["accuracy"]] == [1, 2, 3, 4]
    (out / "fedavg" / "seed0" / "result.json").unlink()
    invoke("bench", "--resume", "--out", str(out))
    assert result(out)["metrics"] == found["metrics"]
    saved = [f"file:{out / 'partition.json'}" if word == "iid" else word for word in BENCH]
    invoke(*saved, "--moving", "2", "--out", str(again))
    assert result(again)["metrics"] == found["metrics"]
    assert result(again)["partition"]["sha256"] == found["partition"]["sha256"]
    invoke("report", str(out), "--html", str(tmp_path / "page.html"))


def test_the_split_in_stages(tmp_path: Path) -> None:
    words = ["partition", *SMALL, "--moving", "1", "--task-order", "own"]
    table, saved = tmp_path / "t.csv", tmp_path / "p.json"
    said = invoke(*words, "--table", str(table), "--save", str(saved), "--export", str(tmp_path / "e.json"))
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 7 and {row[-2] for row in rows} == {"0"}  # nobody's
    assert sum(int(row[2]) for row in rows) == 200  # each image in the stage in which it is first met
    assert load_partition(saved).counts().shape == (7, 3)
    with table.open() as file:
        assert {row["task"] for row in csv.DictReader(file)} == {*"0123456"}


def test_a_plan_in_stages() -> None:
    said = invoke("bench", "--methods", "fedncm", *SMALL, "--moving", "2", "--dry-run")
    assert "moving" in said and "= " in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--methods", "pilora", "--moving", "2"],
            "as they do with --tasks domains, --moving",
        ),
        (["--methods", "lwf", "--task-order", "own"], "lwf holds that a class belongs to one task"),
        (["--methods", "fedncm", "--moving", "3"], "--moving 3 is all of the 3 clients"),
        (["--methods", "fedncm", "--moving", "1", "--joining", "1"], "leave out --joining"),
        (["--methods", "fedncm", "--moving", "0"], "--moving is 0; it must be at least 1"),
    ],
)
def test_what_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    assert says in invoke("bench", *SMALL, *words, "--out", str(tmp_path / "out"), code=1)
