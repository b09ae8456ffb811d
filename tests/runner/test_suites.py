"""Test suites: outdated runs, rows of the archive and the page of results."""

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.environment import commit
from fczoo.reports import suites
from fczoo.reports.archive import read_archive, write_archive
from fczoo.runner import suite as runner_suite
from fczoo.runner import sweep
from fczoo.runner.configs import RunSpec
from helpers_cli import run

SUITE = """
question = "Does a mean need a covariance?"
compare = [["fedlda", "fedncm"]]
[bench]
dataset = "digits"
tasks = 2
clients = 2
train_per_class = 8
test_per_class = 10
seeds = "0-1"
vary = "training,partition"
[[rows]]
method = "fedncm"
role = "control"
[[rows]]
method = "fedlda"
[[rows]]
method = "fedncm"
name = "cosine"
role = "ablation"
set = { distance = "cosine" }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the results folder of a suite, below the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results/suites").mkdir(parents=True)
    (tmp_path / "results/suites/means.toml").write_text(SUITE)
    return tmp_path / "results"


def states(*words: str) -> list[str]:
    """Return the states that ``fczoo suite status`` prints, row by row."""
    lines = run("suite", "status", "means", "--no-estimate", *words).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("---")) + 1
    return [re.split(r"  +", line)[3] for line in lines[start : start + 3]]


def test_suite_runs_missing_and_outdated_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert states() == ["2 missing"] * 3
    run("suite", "run", "means", "--rows", "fedncm,cosine")
    assert states() == ["2 current", "2 missing", "2 current"]
    run("suite", "run", "means")
    assert states() == ["2 current"] * 3
    first = (folder / "means.csv").read_bytes()
    assert run("suite", "run", "means") == "all rows of means are current\n"
    assert (folder / "means.csv").read_bytes() == first

    names = sorted(runs.name for runs in read_archive(folder / "means.csv"))
    labels = ("cosine", "fedlda", "fedncm")
    assert names == [f"{label}/seed{seed}" for label in labels for seed in (0, 1)]

    changed = SUITE.replace("distance", "normalise").replace('"cosine" }', "true }")
    (folder / "suites/means.toml").write_text(changed)
    assert states() == ["2 current", "2 current", "2 outdated (options)"]
    run("suite", "run", "means")
    assert states() == ["2 current"] * 3
    new = {runs.name: runs for runs in read_archive(folder / "means.csv")}
    assert sorted(new) == names
    assert new["cosine/seed0"].records[0].result.options["normalise"] is True

    monkeypatch.setattr(suites, "code_digest", lambda config: "other code")
    assert states() == ["2 outdated (code)"] * 3


def test_row_can_have_fewer_seeds(folder: Path) -> None:
    row = 'method = "fedlda"\n'
    (folder / "suites/means.toml").write_text(SUITE.replace(row, f'{row}seeds = "1"\n'))
    assert states() == ["2 missing", "1 missing", "2 missing"]
    run("suite", "run", "means", "--rows", "fedlda")
    assert states() == ["2 missing", "1 current", "2 missing"]
    assert [runs.name for runs in read_archive(folder / "means.csv")] == ["fedlda/seed1"]

    (folder / "suites/means.toml").write_text(SUITE.replace(row, f'{row}seeds = "one"\n'))
    outcome = CliRunner().invoke(main, ["suite", "status", "means"])
    assert outcome.exit_code != 0
    assert "seeds" in outcome.stderr and "'one'" in outcome.stderr


def test_interrupted_suite_keeps_finished_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt a suite in its fourth run and resume it after three rows without run folders."""
    execute, begun = sweep.execute_run, []

    def stop_at_fourth_run(spec: RunSpec, *arguments: Any) -> bool:
        begun.append(spec.label)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return execute(spec, *arguments)

    monkeypatch.setattr(sweep, "execute_run", stop_at_fourth_run)
    outcome = CliRunner().invoke(main, ["suite", "run", "means"])
    assert outcome.exit_code == 130
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("Error")]
    assert errors == [
        "Error: stopped on request; finished runs are archived, and the same command resumes"
    ]
    assert "Traceback" not in outcome.stderr
    lines = (folder / "means.csv").read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3
    for count in (1, 2, 3):  # a run can be read as soon as it has ended
        (folder / "first.csv").write_text("".join(lines[: 1 + count]))
        record = read_archive(folder / "first.csv")[-1].records[0]
        assert record.bench_file.hardware["cpu"]
        assert len(record.result.versions["code"]) == 64
        assert record.result.versions.get("commit", "") == commit()
    monkeypatch.setattr(sweep, "execute_run", execute)
    shutil.rmtree(folder / "suite-runs")  # as on another machine
    begun.clear()
    monkeypatch.setattr(sweep, "execute_run", lambda *a: begun.append(a[0].label) or execute(*a))
    run("suite", "run", "means")
    assert len(begun) == 3
    assert (folder / "means.csv").read_text().startswith("".join(lines))


def test_replication_is_stored_in_separate_file(folder: Path) -> None:
    """Run a current row again, store it in a separate file and add a column to the page."""
    assert "nothing to replicate" in run("suite", "run", "means", "--replicate")
    run("suite", "run", "means", "--rows", "fedncm,fedlda")
    archive = (folder / "means.csv").read_bytes()
    run("suite", "run", "means", "--rows", "fedncm", "--replicate")
    assert (folder / "means.csv").read_bytes() == archive
    again = {runs.name: runs.records[0] for runs in read_archive(folder / "means.replication.csv")}
    assert sorted(again) == ["fedncm/seed0", "fedncm/seed1"]
    run("suite", "report", "means")
    rows = table(folder / "means.md")
    assert rows["fedncm"]["replication"] == "+0.0"
    assert rows["fedlda"]["replication"] == "–"
    assert "A_N of 2 repeated runs (fczoo " in (folder / "means.md").read_text()


def test_equal_runs_of_another_suite_are_copied(folder: Path) -> None:
    """Copy a row whose settings, options and code are equal; run the others."""
    run("suite", "run", "means", "--rows", "fedncm,cosine")
    other_suite = SUITE.replace('name = "cosine"', 'name = "angle"').replace("fedlda", "fedridge")
    (folder / "suites/others.toml").write_text(other_suite)
    status = run("suite", "status", "others", "--no-estimate")
    assert "2 missing, in means.csv" in status
    assert status.count("in means.csv") == 2
    text = run("suite", "run", "others", "--rows", "fedncm,angle")
    assert text.splitlines() == [
        "fedncm: 2 runs copied from means.csv",
        "angle: 2 runs copied from means.csv",
        "all rows of others are current",
    ]
    originals, copies = (
        {runs.name: runs.records[0].result.accuracy for runs in read_archive(folder / file)}
        for file in ("means.csv", "others.csv")
    )
    for seed in (0, 1):
        assert copies[f"angle/seed{seed}"] == originals[f"cosine/seed{seed}"]
        assert copies[f"fedncm/seed{seed}"] == originals[f"fedncm/seed{seed}"]

    longer_suite = other_suite.replace('seeds = "0-1"', 'seeds = "0-2"').replace(
        "train_per_class = 8", ""
    )
    (folder / "suites/longer.toml").write_text(longer_suite)  # other images: nothing is equal
    assert "copied" not in run("suite", "run", "longer", "--rows", "fedncm")


def table(page: Path) -> dict[str, dict[str, str]]:
    """Return the first table of a page: label of the row -> heading -> cell."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    stop = next((i for i, row in enumerate(cells[2:], 2) if len(row) != len(cells[0])), len(cells))
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:stop]}


def test_time_of_missing_rows_is_estimated(folder: Path) -> None:
    """Estimate the features of rows without training once, since all rows share them."""
    lines = run("suite", "status", "means").splitlines()
    times = {line.split()[0]: re.split(r"  +", line)[-1] for line in lines[3:] if "missing" in line}
    assert re.fullmatch(r"\d+ (s|min)", times["fedncm"])
    assert times["fedlda"] == times["cosine"] == "included in another row's time"


def test_page_is_rebuilt_from_archive(folder: Path) -> None:
    run("suite", "run", "means")
    (folder / "suites/means.notes.md").write_text("A note.\n")
    run("suite", "report", "means")
    page = (folder / "means.md").read_text()
    (folder / "means.md").unlink()
    for work in (folder / "suite-runs").rglob("result.json"):
        work.unlink()
    for old in ("means-7.png", "means-ranks.png", "means-2-1.png"):
        (folder / "pictures" / old).touch()
    run("suite", "report", "means")
    assert (folder / "means.md").read_text() == page
    assert page.endswith("## Notes\n\nA note.\n")
    assert "Does a mean need a covariance?" in page
    assert "| cosine | ablation |" in " ".join(page.split(" ")).replace("  ", "")
    pictures = {picture.name for picture in (folder / "pictures").iterdir()}
    assert pictures == {"means-1.png", "means-2-1.png"}  # the latter is of a suite `means-2`


def test_page_rejects_rows_of_different_code(folder: Path) -> None:
    run("suite", "run", "means", "--rows", "fedncm")
    archive = folder / "means.csv"
    first, second = read_archive(archive)
    result = replace(second.records[0].result, versions={"code": "f" * 64})
    other = replace(second, records=(replace(second.records[0], result=result),))
    write_archive([first, other], archive)
    outcome = CliRunner().invoke(main, ["suite", "report", "means"])
    assert outcome.exit_code == 1
    assert (
        "runs of fedncm in results/means.csv have different code or different options"
        in outcome.stderr
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("question", "questio", "is not a valid suite"),
        ('["fedlda", "fedncm"]', '["fedlda", "ncm"]', "compare has unknown row 'ncm'"),
        ('name = "cosine"', 'name = "fedncm"', "two rows are called fedncm"),
        ('name = "cosine"', 'name = "a/b"', "cannot name a folder"),
        ('name = "cosine"', 'name = "a, b"', "row name 'a, b' has a comma"),
        ('method = "fedlda"', 'method = "fedlde"\nname = "fedlda"', "did you mean fedlda"),
        ("tasks = 2", "tsks = 2", "no option is called 'tsks'"),
        ('role = "control"', 'role = "upper"', "is not a valid suite"),
    ],
)
def test_invalid_suite_file_is_rejected(folder: Path, old: str, new: str, problem: str) -> None:
    (folder / "suites/means.toml").write_text(SUITE.replace(old, new))
    outcome = CliRunner().invoke(main, ["suite", "status", "means"])
    assert outcome.exit_code != 0
    assert problem in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["status", "mean"], "no suite at results/suites/mean.toml; did you mean means"),
        (["report", "means"], "no archive results/means.csv"),
        (["run", "means", "--rows", "fedncn"], "means has no row 'fedncn'; did you mean fedncm"),
    ],
)
def test_invalid_suite_command_is_rejected(folder: Path, words: list[str], problem: str) -> None:
    outcome = CliRunner().invoke(main, ["suite", *words])
    assert outcome.exit_code != 0
    assert problem in outcome.output


@pytest.mark.slow
def test_row_stores_its_search(folder: Path) -> None:
    text = f"trials = 2\nfirst_tasks = 1\n{SUITE}"
    (folder / "suites/means.toml").write_text(text)
    run("suite", "run", "means", "--rows", "fedncm,cosine")
    assert states() == ["2 current", "2 missing", "2 current"]
    by_row = {runs.name: runs.records[0] for runs in read_archive(folder / "means.csv")}
    assert by_row["cosine/seed0"].result.options["distance"] == "cosine"  # fixed, not searched
    for record in by_row.values():
        tried = record.search["tried"]
        assert (record.trials, record.search["tasks"]) == (2, 1)
        assert len(tried["rows"]) == 2
        assert all(len(row) == 1 + len(tried["options"]) for row in tried["rows"])
        assert record.search["score"] == max(row[0] for row in tried["rows"])
        assert record.search["default_score"] == tried["rows"][0][0]
    (folder / "suites/means.toml").write_text(text.replace("trials = 2", "trials = 3"))
    assert states() == ["2 outdated (search)", "2 missing", "2 outdated (search)"]


@pytest.mark.slow
def test_stored_search_values_are_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"trials = 2\nfirst_tasks = 1\n{SUITE}"
    (folder / "suites/means.toml").write_text(text.replace('"0-1"', '"0"'))
    run("suite", "run", "means", "--rows", "fedncm")
    shutil.rmtree(folder / "suite-runs")
    (folder / "suites/means.toml").write_text(text)
    assert states()[0] == "1 current, 1 missing"
    monkeypatch.setattr(runner_suite, "tune", None)  # a search would fail
    run("suite", "run", "means", "--rows", "fedncm")
    first, second = (runs.records[0] for runs in read_archive(folder / "means.csv"))
    assert first.result.options == second.result.options
    assert first.search == second.search


def test_failed_search_fails_only_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(methods: list[str], *arguments: Any, **more: Any) -> None:
        raise FczooError(f"no trial of {methods[0]} succeeded")

    (folder / "suites/means.toml").write_text(f"trials = 2\n{SUITE}")
    monkeypatch.setattr(runner_suite, "tune", fail)
    outcome = CliRunner().invoke(main, ["suite", "run", "means", "--rows", "fedncm"])
    assert outcome.exit_code == 1
    assert "2 runs of means failed; failed.json below" in outcome.stderr
    assert states() == ["2 failed", "2 missing", "2 missing"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_search_keeps_finished_trials(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Stop a search in its second trial: the first is kept, and the command resumes after it."""
    (folder / "suites/means.toml").write_text(f"trials = 3\nfirst_tasks = 1\n{SUITE}")
    trial, begun = Benchmark.run, []

    def stop_at_second_trial(bench: Benchmark, *arguments: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 2:
            signal.raise_signal(number)
        return trial(bench, *arguments)

    monkeypatch.setattr(Benchmark, "run", stop_at_second_trial)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    outcome = CliRunner().invoke(main, ["suite", "run", "means", "--rows", "fedncm"])
    signal.signal(signal.SIGINT, handler)
    assert outcome.exit_code == 130
    errors = [line for line in outcome.stderr.splitlines() if "Error" in line]
    assert errors == [
        "Error: stopped on request; finished runs are archived, and the same command resumes"
    ]
    begun.clear()
    monkeypatch.setattr(Benchmark, "run", lambda *a: begun.append(a) or trial(*a))
    run("suite", "run", "means", "--rows", "fedncm")
    assert len(begun) == 2  # the second trial again, and the third
