"""Test that warnings of runs reach the log, ``bench.json`` and every table."""

import json
import logging
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import fczoo
from fczoo.cli.app import main
from fczoo.core.errors import log_place
from fczoo.reports.run_folder import read_bench_file
from fczoo.runner.warnings import (
    LocatedWarning,
    WarningRecorder,
    earlier_warnings,
    gather_warnings,
    read_warnings,
)
from helpers_cli import TINY, run
from helpers_warm import warm_python

SMALL = ["--train-per-class", "8", "--test-per-class", "4", "--tasks", "3", "--clients", "5"]
SKEW_SPEC = "dirichlet:0.001,min_size=4"  # each class goes to one client
REPAIR_WARNING = (
    "dirichlet:0.001 left a client with fewer than 4 images in each of 100 draws; images of the "
    "largest clients were moved to such clients"
)
TASKS = " (3 times: task 1; task 2; task 3)"
FULL = "glfc.memory=1 has no room for one image of each of the client's"


@pytest.fixture(scope="module")
def repaired_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose partition was repaired, with the printed table."""
    folder = tmp_path_factory.mktemp("repaired") / "run"
    words = [*SMALL, "--partition", SKEW_SPEC]
    table = run("bench", "--methods", "fedncm", "--out", str(folder), *words)
    (folder / "table.txt").write_text(table)
    return folder


def test_repaired_partition_warning_is_in_every_file(repaired_run: Path) -> None:
    assert read_bench_file(repaired_run).warnings == [f"{REPAIR_WARNING}{TASKS}"]
    assert f" WARNING {REPAIR_WARNING}{TASKS}\n" in (repaired_run / "log.txt").read_text()
    assert f"warning: {REPAIR_WARNING}{TASKS}" in (repaired_run / "table.txt").read_text()
    assert json.loads((repaired_run / "summary.json").read_text())["warnings"] == [
        f"{REPAIR_WARNING}{TASKS}"
    ]
    for name in ("summary.md", "summary.csv"):
        assert f"{REPAIR_WARNING}{TASKS}" in (repaired_run / name).read_text(), name


@pytest.mark.parametrize("style", ["text", "markdown", "latex", "csv", "json"])
def test_reports_contain_warning(repaired_run: Path, style: str) -> None:
    assert REPAIR_WARNING in run("report", str(repaired_run), "--format", style)


def test_archive_and_page_contain_warning(repaired_run: Path, tmp_path: Path) -> None:
    archive, page = tmp_path / "runs.csv", tmp_path / "page.html"
    run("report", str(repaired_run), "--archive", str(archive))
    run("report", str(repaired_run), "--html", str(page))
    assert f"warning: {REPAIR_WARNING}{TASKS}" in run("report", str(archive))
    assert f"{REPAIR_WARNING}{TASKS}" in page.read_text(encoding="utf-8")


def test_sweep_records_warnings_per_run_folder(tmp_path: Path) -> None:
    words = [*SMALL, "--partition", "iid,dirichlet:0.001"]
    run("bench", "--methods", "fedncm", "--out", str(tmp_path), *words)
    assert read_bench_file(tmp_path / "iid").warnings == []
    warnings = read_bench_file(tmp_path / "dirichlet_0.001").warnings
    assert warnings == [
        f"{REPAIR_WARNING.replace('4', '6')} (task 1)",
        f"{REPAIR_WARNING} (2 times: task 2; task 3)",
    ]


def test_short_schedule_warning_is_recorded(tmp_path: Path) -> None:
    words = [*TINY, "--clients", "5", "--batch-size", "32", "--partition", "iid"]
    run("bench", "--methods", "hgp", "--out", str(tmp_path / "run"), *words)
    (line,) = read_bench_file(tmp_path / "run").warnings
    assert line.startswith("hgp may learn little with server_lr=0.001, chosen for the ")
    assert "schedule of data set digits" in line
    assert f" WARNING {line}\n" in (tmp_path / "run" / "log.txt").read_text()


def test_run_warnings_are_recorded_once(tmp_path: Path) -> None:
    words = ["bench", "--methods", "glfc", "--set", "glfc.memory=1", *TINY, "--tasks", "5"]
    first = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "run")])
    again = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "run"), "--seeds", "0-1"])
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    lines = [line for line in read_bench_file(tmp_path / "run").warnings if "2 classes" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"glfc: {FULL} 2 classes: it stores no exemplars (")
    assert "seed 0, task 2, client 2; " in lines[0]
    assert f"warning: {lines[0]}" in again.stdout
    assert FULL in (tmp_path / "run" / "log.txt").read_text()


def test_python_api_records_warnings(tmp_path: Path) -> None:
    small = {
        "train_per_class": 8,
        "test_per_class": 4,
        "tasks": 3,
        "clients": 5,
        "partition": SKEW_SPEC,
    }
    fczoo.bench("fedncm", out=tmp_path / "run", **small)
    assert read_bench_file(tmp_path / "run").warnings == [f"{REPAIR_WARNING}{TASKS}"]


def test_warnings_before_run_are_recorded(tmp_path: Path) -> None:
    """Record warnings of ``--tuned``, which come before the run folder exists."""
    with gather_warnings():
        logging.getLogger("fczoo").warning("--tuned has no values for %s", "fedncm")
        assert earlier_warnings() == [LocatedWarning("--tuned has no values for fedncm", "")]
        small = {
            "train_per_class": 8,
            "test_per_class": 4,
            "tasks": 3,
            "clients": 3,
            "partition": "iid",
        }
        fczoo.bench("fedncm", out=tmp_path / "run", **small)
    assert read_bench_file(tmp_path / "run").warnings == ["--tuned has no values for fedncm"]


def test_warning_file_has_no_duplicates_after_kill(tmp_path: Path) -> None:
    file = tmp_path / "warnings.jsonl"
    for _ in range(2):  # as a run that resumes
        with WarningRecorder(file), log_place("task 1"):
            logging.getLogger("fczoo").warning("too %s", "small")
            logging.getLogger("fczoo").warning("too %s", "small")
    assert file.read_text() == '{"text": "too small", "place": "task 1"}\n'
    with file.open("a") as half:
        half.write('{"text": "too')
    assert read_warnings(file) == [LocatedWarning("too small", "task 1")]


def test_worker_warnings_name_method_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())  # of the workers
    words = [*TINY, "--clients", "3", "--tasks", "2", "--partition", SKEW_SPEC, "--jobs", "2"]
    run(
        "bench",
        "--methods",
        "glfc,fedncm",
        "--set",
        "glfc.memory=1",
        "--out",
        str(tmp_path / "run"),
        *words,
    )
    lines = [
        line for line in read_bench_file(tmp_path / "run").warnings if line.startswith("glfc: ")
    ]
    assert lines
    assert all(line.count("glfc: ") == 1 and "seed 0, task 2" in line for line in lines)
