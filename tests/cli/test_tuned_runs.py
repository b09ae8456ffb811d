"""Test run folders that were started with ``--tuned``.

They are resumed, extended and run again.
"""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.files import write_record
from fczoo.reports.run_folder import FORMAT
from fczoo.runner.tuned_file import TUNED_FILE
from helpers_cli import TINY, run


@pytest.fixture(scope="module")
def search_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("search")
    run("tune", "--methods", "fedncm,fedridge", "--trials", "2", *TINY, "--out", str(folder))
    return str(folder / TUNED_FILE)


@pytest.fixture
def tuned_run(search_folder: str, tmp_path: Path) -> Path:
    out = tmp_path / "runs"
    run("bench", "--methods", "fedncm,fedridge", "--tuned", search_folder, *TINY, "--out", str(out))
    return out


def about(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())


def test_tuned_run_resumes_without_tuned_option(tuned_run):
    record = about(tuned_run)
    shutil.rmtree(tuned_run / "fedridge" / "seed0")
    assert "2 trials of" in run("bench", "--resume", "--out", str(tuned_run))
    assert (tuned_run / "fedridge" / "seed0" / "result.json").is_file()
    assert about(tuned_run)["tuned"] == record["tuned"]
    assert record["tuned"]["methods"] == ["fedncm", "fedridge"]


def test_tuned_run_accepts_more_seeds_of_one_method(tuned_run, search_folder):
    record = about(tuned_run)["tuned"]
    run(
        "bench",
        "--methods",
        "fedridge",
        "--seeds",
        "1",
        "--tuned",
        search_folder,
        *TINY,
        "--out",
        str(tuned_run),
    )
    assert about(tuned_run)["tuned"] == record and about(tuned_run)["seeds"] == [0, 1]


def test_untuned_method_joins_tuned_run(tuned_run):
    record = about(tuned_run)["tuned"]
    run("bench", "--methods", "afcl", *TINY, "--out", str(tuned_run))
    assert about(tuned_run)["tuned"] == record
    assert len(about(tuned_run)["methods"]) == 3


def test_tuned_method_joins_untuned_run(search_folder, tmp_path):
    out = ["--out", str(tmp_path / "runs")]
    run("bench", "--methods", "afcl", *TINY, *out)
    run("bench", "--methods", "fedncm", "--tuned", search_folder, *TINY, *out)
    assert about(tmp_path / "runs")["tuned"]["methods"] == ["fedncm"]


def test_other_search_is_rejected(tuned_run, tmp_path):
    run("tune", "--methods", "fedridge", "--trials", "1", *TINY, "--out", str(tmp_path / "other"))
    words = ["--tuned", str(tmp_path / "other" / TUNED_FILE), *TINY, "--out", str(tuned_run)]
    outcome = CliRunner().invoke(main, ["bench", "--methods", "fedridge", *words])
    assert outcome.exit_code == 1
    assert "already in use by another configuration" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "tuned", "other"),
    [
        ([], ["fedncm", "fedridge"], None),
        (["--set", "fedridge.ridge=7.5"], ["fedncm"], None),
        (["--rounds", "2"], ["fedncm", "fedridge"], {"rounds": 1}),
    ],
)
def test_run_description_repeats_tuned_run(tuned_run, tmp_path, words, tuned, other):
    """Run a tuned folder again from its description, as tuned.

    A method whose options are changed by hand does not count as tuned. Settings that differ from
    the search's are reported.
    """
    again = tmp_path / "again"
    run("bench", "--config", str(tuned_run / "bench.json"), *words, "--out", str(again))
    record = about(again)["tuned"]
    assert record["methods"] == tuned and record.get("other_settings") == other
    assert record["trials"] == 2


def test_list_settings_match_search(tmp_path, caplog):
    words = ["--methods", "fedridge", *TINY, "--tasks", "4,6"]
    run("tune", *words, "--trials", "1", "--out", str(tmp_path / "search"))
    run(
        "bench",
        *words,
        "--tuned",
        str(tmp_path / "search" / TUNED_FILE),
        "--out",
        str(tmp_path / "runs"),
    )
    assert "unlike this run" not in caplog.text
    assert "other_settings" not in about(tmp_path / "runs")["tuned"]


def test_report_warns_about_search_on_other_weights(tuned_run):
    content = about(tuned_run)
    assert content["tuned"]["weights"] == content["backbone"]["sha256"]
    assert "other weights" not in run("report", str(tuned_run))
    new_content = {**content, "tuned": {**content["tuned"], "weights": "0" * 64}}
    write_record(
        tuned_run / "bench.json", FORMAT, {k: v for k, v in new_content.items() if k != "sha256"}
    )
    assert "with other weights of the backbone: fedncm, fedridge" in run("report", str(tuned_run))
