"""Test the installed ``fczoo`` command as a user runs it."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.metrics import all_metrics
from fczoo.data.partition import load_partition
from fczoo.reports.run_folder import write_bench_file
from helpers_cli import TINY
from helpers_warm import warm_commands


def fczoo(
    *arguments: str, cwd: Path | None = None, fail: bool = False, command: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process.

    Args:
        arguments: Words of the command.
        cwd: Folder in which it runs.
        fail: Whether it must fail.
        command: The installed command, which imports torch again, or one that starts fast.
    """
    process = subprocess.run(
        [command or warm_commands() / "fczoo", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )
    assert (process.returncode != 0) == fail, process.stderr
    return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a bench; return its folder and what it printed."""
    out = tmp_path_factory.mktemp("bench") / "run"
    installed_command = shutil.which("fczoo", path=str(Path(sys.executable).parent))
    assert installed_command, (
        "the fczoo command is not installed next to this Python; run pip install -e '.[test]'"
    )
    process = fczoo(
        "bench",
        "--methods",
        "hgp,fedncm",
        "--seeds",
        "0,1",
        "--set",
        "hgp.prefix_len=4",
        *TINY,
        "--out",
        str(out),
        command=installed_command,
    )
    return out, process.stdout


def test_bench_prints_settings_and_one_row_per_method(folder):
    _, output = folder
    for phrase in (
        "digits: 3 tasks of 3 to 4 classes",
        "dirichlet:0.5",
        "vit_nano_32",
        "seeds 0, 1",
        "A_N",
        "Avg",
        "FAA",
        "forgetting",
        "MB up",
        "seconds",
    ):
        assert phrase in output
    assert [
        line.split()[0] for line in output.splitlines() if line.startswith(("hgp ", "fedncm "))
    ] == ["hgp", "fedncm"]
    assert [line for line in output.splitlines() if line.startswith("hgp: ")] == [
        "hgp: prefix_len=4, set by the user",
        "hgp: server_lr=0.001, the method's values for digits",
    ]


def test_run_folder_stores_settings_results_and_rounds(folder):
    out, _ = folder
    about = json.loads((out / "bench.json").read_text())
    assert about["methods"]["hgp"]["prefix_len"] == 4
    assert about["settings"]["tasks"] == 3
    assert about["seeds"] == [0, 1]
    assert about["split"] == "stratified 80/20 of scikit-learn, seed 0"
    partition = load_partition(out / "partition.json")
    assert partition.sha256 == about["partition"]["sha256"]
    assert partition.clients == 3
    for method in ("hgp", "fedncm"):
        result = json.loads((out / method / "seed1" / "result.json").read_text())
        assert result["finished"]
        assert result["seed"] == 1
        assert result["method"] == method
        assert [len(row) for row in result["accuracy"]] == [1, 2, 3]
        assert result["test_counts"] == [16, 12, 12]
        of_matrix = all_metrics(result["accuracy"], result["test_counts"])
        assert of_matrix.items() <= result["metrics"].items()
        assert len(result["backbone"]["sha256"]) == 64
        assert result["partition"]["sha256"] == partition.sha256
        assert result["versions"]["torch"]
        assert result["peak_memory"]["run"] > 0
        assert result["bytes_up"] > 0
    rounds = [
        json.loads(line)
        for line in (out / "hgp" / "seed0" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [r["task"] for r in rounds] == [0, 1, 2]
    assert (
        sum(r["bytes_up"] for r in rounds)
        == json.loads((out / "hgp" / "seed0" / "result.json").read_text())["bytes_up"]
    )


def test_summary_files_match_results(folder):
    out, _ = folder
    finals = [
        json.loads((out / "hgp" / f"seed{s}" / "result.json").read_text())["metrics"]["A_N"]
        for s in (0, 1)
    ]
    row = next(r for r in csv.DictReader((out / "summary.csv").open()) if r["method"] == "hgp")
    assert float(row["A_N"]) == pytest.approx(sum(finals) / 2)
    assert row["seeds"] == "2"
    assert float(row["A_N std"]) == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    assert f"{sum(finals) / 2:.1f} ±" in (out / "summary.md").read_text()
    assert json.loads((out / "summary.json").read_text())["rows"][0]["method"] == "hgp"


def test_repeated_command_keeps_runs_and_rejects_other_options(folder):
    out, output = folder
    log_names = ("bench.json", "log.txt")  # of every command
    contents = {
        p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in log_names
    }
    (
        out / "summary.md"
    ).unlink()  # as if the machine had stopped between the last result and the summary
    again = fczoo(
        "bench",
        "--methods",
        "hgp,fedncm",
        "--seeds",
        "0,1",
        "--set",
        "hgp.prefix_len=4",
        *TINY,
        "--out",
        str(out),
    )
    assert again.stdout == output
    assert again.stderr.count("already finished, skipped") == 4
    for change in (
        ["--set", "hgp.prefix_len=5"],
        ["--set", "hgp.prefix_len=4", "--batch-size", "4"],
    ):
        outcome = CliRunner().invoke(
            main, ["bench", "--methods", "hgp", *TINY, *change, "--out", str(out)]
        )
        assert (
            "prefix_len was 4, is 5" if "--batch-size" not in change else "settings.batch_size was"
        ) in outcome.stderr
    assert {
        p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in log_names
    } == contents


def test_out_folder_with_foreign_files_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    outcome = CliRunner().invoke(
        main, ["bench", "--methods", "fedncm", *TINY, "--out", str(tmp_path)]
    )
    assert outcome.exit_code == 1
    assert "exists and is not a run folder; give another with --out" in outcome.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_skipped_run_stores_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("fczoo.baselines.fedncm.FedNCM.update_from", broken)
    words = ["bench", "--methods", "fedncm", *TINY, "--skip-failed", "--out", str(tmp_path / "run")]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1
    assert "ZeroDivisionError: by nothing" in outcome.stderr
    record = json.loads((tmp_path / "run" / "fedncm" / "seed0" / "failed.json").read_text())
    assert record["error"] == "ZeroDivisionError: by nothing"
    assert "in broken\n" in record["traceback"]
    assert record["traceback"].startswith("Traceback")


def test_grid_continues_after_failures_and_retries_them(tmp_path):
    out, head = (
        tmp_path / "grid",
        ["--methods", "fedncm,pilora", "--partition", "iid,dirichlet:0.5", *TINY, "--epochs", "2"],
    )
    outcome = CliRunner().invoke(
        main,
        ["bench", *head, "--set", "pilora.lr_prototype=1e30", "--skip-failed", "--out", str(out)],
    )
    assert outcome.exit_code == 1
    assert outcome.stdout.count("not finished: pilora seed 0: pilora diverged") == 2
    assert "2 of the runs failed" in outcome.stderr
    assert [
        sum(line.startswith(m) for line in outcome.stdout.splitlines())
        for m in ("fedncm ", "pilora ")
    ] == [2, 0]
    for run_folder in (out / "iid", out / "dirichlet_0.5"):
        assert (
            "lower its learning rates"
            in json.loads((run_folder / "pilora" / "seed0" / "failed.json").read_text())["error"]
        )
        about = json.loads((run_folder / "bench.json").read_text())
        # as if the failure had been the machine's
        about["methods"]["pilora"]["lr_prototype"] = 0.02
        write_bench_file(run_folder, about)
    again = CliRunner().invoke(main, ["bench", *head, "--out", str(out)])
    assert again.exit_code == 0
    assert again.stderr.count("fedncm seed 0: already finished, skipped") == 2
    assert "not finished" not in again.stdout
    assert [
        sum(line.startswith(m) for line in again.stdout.splitlines())
        for m in ("fedncm ", "pilora ")
    ] == [2, 2]


def test_saved_partition_is_reused(folder, tmp_path):
    out, _ = folder
    fczoo(
        "bench",
        "--methods",
        "fedncm",
        *TINY,
        "--partition",
        f"file:{out / 'partition.json'}",
        "--out",
        str(tmp_path / "again"),
    )
    assert (
        load_partition(tmp_path / "again" / "partition.json").sha256
        == load_partition(out / "partition.json").sha256
    )


def test_installed_command_reports_one_error_line(tmp_path):
    process = fczoo("bench", "--methods", "hgpp", cwd=tmp_path, fail=True)
    assert process.returncode == 1
    assert process.stderr == "Error: no method is called 'hgpp'; did you mean hgp, pip, fppl?\n"


def test_diverged_run_keeps_finished_results(tmp_path):
    out = tmp_path / "run"
    wild = [
        "--set",
        "fppl.lr=1e30",
        "--set",
        "fppl.head_init=default",
    ]  # from zero one step moves the head only
    process = fczoo("bench", "--methods", "fedncm,fppl", *wild, *TINY, "--out", str(out), fail=True)
    assert "fppl diverged" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
    assert json.loads((out / "fedncm" / "seed0" / "result.json").read_text())["finished"]
    assert [r["method"] for r in json.loads((out / "summary.json").read_text())["rows"]] == [
        "fedncm"
    ]


def test_incompatible_aggregator_is_rejected(tmp_path):
    outcome = CliRunner().invoke(
        main,
        [
            "bench",
            "--methods",
            "fppl",
            "--aggregator",
            "prototype_reweight",
            *TINY,
            "--out",
            str(tmp_path / "run"),
        ],
    )
    assert outcome.exit_code == 1
    assert (
        "aggregator prototype_reweight belongs to one method and cannot replace averages"
        in outcome.stderr
    )


def test_partition_list_keeps_fields_of_each_spec(tmp_path):
    specs = "dirichlet:beta=0.5,min_size=2,iid,dirichlet:0.1,cap=true"
    outcome = CliRunner().invoke(
        main,
        [
            "bench",
            "--methods",
            "fedncm",
            "--partition",
            specs,
            *TINY,
            "--out",
            str(tmp_path / "grid"),
        ],
    )
    assert outcome.exit_code == 0, outcome.output
    assert {p.name for p in (tmp_path / "grid").iterdir() if p.is_dir()} == {
        "dirichlet_0.5,min_size=2",
        "iid",
        "dirichlet_0.1,cap=on",
    }


def test_settings_with_same_folder_name_are_rejected(tmp_path):
    specs = ",".join(f"file:{tmp_path / name / 'partition.json'}" for name in "ab")
    outcome = CliRunner().invoke(
        main,
        [
            "bench",
            "--methods",
            "fedncm",
            "--partition",
            specs,
            *TINY,
            "--out",
            str(tmp_path / "grid"),
        ],
    )
    assert outcome.exit_code == 1
    assert "would share a run folder" in outcome.stderr
    assert not (tmp_path / "grid").exists()
