"""Suites: runs to repeat, rows of the archive, and the page that its rows rebuild."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.board.suite_page import page_text
from fczoo.cli.app import main
from fczoo.reports import suites
from fczoo.reports.archive import read_archive
from fczoo.reports.runs import read_experiments
from helpers_cli import run
from helpers_runs import write_run

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
    lines = run("suite", "status", "means", *words).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("---")) + 1
    return [" ".join(line.split()[3:5]) for line in lines[start : start + 3]]


def test_a_suite_runs_what_is_missing_or_stale(
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
    assert states() == ["2 current", "2 current", "2 stale"]
    run("suite", "run", "means")
    assert states() == ["2 current"] * 3
    new = {runs.name: runs for runs in read_archive(folder / "means.csv")}
    assert sorted(new) == names
    assert new["cosine/seed0"].records[0].result.options["normalise"] is True

    monkeypatch.setattr(suites, "code_digest", lambda config: "other code")
    assert states() == ["2 stale"] * 3


def test_the_page_has_the_rows_of_the_archive_alone(folder: Path) -> None:
    run("suite", "run", "means")
    (folder / "suites/means.notes.md").write_text("A note.\n")
    run("suite", "report", "means")
    page = (folder / "means.md").read_text()
    (folder / "means.md").unlink()
    for work in (folder / "suite-runs").rglob("result.json"):
        work.unlink()
    run("suite", "report", "means")
    assert (folder / "means.md").read_text() == page
    assert page.endswith("## Notes\n\nA note.\n")
    assert "Does a mean need a covariance?" in page
    assert "| cosine | ablation |" in " ".join(page.split(" ")).replace("  ", "")
    assert (folder / "pictures/means-1.png").is_file()


def test_differences_are_tested_and_worded(tmp_path: Path) -> None:
    # A_N is the mean of the accuracy given and 80: differences of HGP to FedAvg 5.0, 5.5, 6.0
    # (t = 19.05, p = 0.00274), to EWC 0.5, -0.5, 1.5 (t = 0.866, p = 0.478)
    write_run(
        tmp_path / "run",
        {
            "hgp": {0: 70.0, 1: 71.0, 2: 72.0},
            "fedavg": {0: 60.0, 1: 60.0, 2: 60.0},
            "ewc": {0: 69.0, 1: 72.0, 2: 69.0},
        },
    )
    suite = suites.Suite(
        question="Which?",
        bench={},
        rows=[suites.SuiteRow("hgp"), suites.SuiteRow("fedavg"), suites.SuiteRow("ewc")],
        compare=[("fedavg", "hgp"), ("hgp", "ewc")],
    )
    text = page_text("which", suite, read_experiments([tmp_path]))
    assert "p values corrected for 2 comparisons (Holm)" in text
    assert "- hgp is significantly better than fedavg: 5.5 points, p = 0.0055." in text
    assert "- hgp and ewc do not differ significantly: 0.5 points, p = 0.48." in text
    # 75, 75.5 and 76: mean 75.5, half width 4.303 * 0.5 / sqrt(3) = 1.242
    assert "74.3 to 76.7" in text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("question", "questio", "is not a suite"),
        ('["fedlda", "fedncm"]', '["fedlda", "ncm"]', "compare names 'ncm', no row"),
        ('name = "cosine"', 'name = "fedncm"', "two rows are called fedncm"),
        ('name = "cosine"', 'name = "a/b"', "cannot name a folder"),
        ('method = "fedlda"', 'method = "fedlde"\nname = "fedlda"', "did you mean fedlda"),
        ("tasks = 2", "tsks = 2", "no option is called 'tsks'"),
        ('role = "control"', 'role = "upper"', "is not a suite"),
    ],
)
def test_a_wrong_file_is_one_line(folder: Path, old: str, new: str, problem: str) -> None:
    (folder / "suites/means.toml").write_text(SUITE.replace(old, new))
    outcome = CliRunner().invoke(main, ["suite", "status", "means"])
    assert outcome.exit_code != 0
    assert problem in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["status", "mean"], "no suite is at results/suites/mean.toml; did you mean means"),
        (["report", "means"], "results/means.csv is missing"),
        (["run", "means", "--rows", "fedncn"], "means has no row 'fedncn'; did you mean fedncm"),
    ],
)
def test_a_wrong_command_is_one_line(folder: Path, words: list[str], problem: str) -> None:
    outcome = CliRunner().invoke(main, ["suite", *words])
    assert outcome.exit_code != 0
    assert problem in outcome.output


@pytest.mark.slow
def test_a_row_carries_its_search(folder: Path) -> None:
    text = f"trials = 1\nfirst_tasks = 1\n{SUITE}"
    (folder / "suites/means.toml").write_text(text)
    run("suite", "run", "means", "--rows", "fedncm,cosine")
    assert states() == ["2 current", "2 missing", "2 current"]
    found = {runs.name: runs.records[0] for runs in read_archive(folder / "means.csv")}
    assert found["fedncm/seed1"].trials == 1
    assert found["cosine/seed0"].trials == 1
    assert found["cosine/seed0"].result.options["distance"] == "cosine"  # fixed, not searched
    (folder / "suites/means.toml").write_text(text.replace("trials = 1", "trials = 2"))
    assert states() == ["2 stale", "2 missing", "2 stale"]
