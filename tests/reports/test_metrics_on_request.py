"""``fczoo report --metrics``: chosen columns, in every format and from archives."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.files import write_json
from fczoo.federation.result import read_result, write_result
from helpers_runs import write_run


def evaluated_run(folder: Path) -> Path:
    """Write runs of two methods, one with evaluations, and of joint training."""
    write_run(folder, {"hgp": {0: 60.0, 1: 60.0}, "fedavg": {0: 50.0}, "joint": {0: 85.0}})
    for seed in (0, 1):
        path = folder / "hgp" / f"seed{seed}" / "result.json"
        result = read_result(path)
        result.task_aware, result.next_accuracy = [[90.0], [84.0, 84.0]], [None] * 2
        result.top5, result.calibration = [100.0, 96.0], [5.0, 7.5]
        last = [60.0] * 5 + [80.0] * 5
        result.class_accuracy = [[90.0] * 5, last]
        result.test_counts, right = [50, 50], [6] * 5 + [8] * 5
        result.confusion = [
            entry for c, n in enumerate(right) for entry in ([c, (c + 1) % 10, 10 - n], [c, c, n])
        ]
        result.metrics = {}
        write_result(path, result)
    return folder


def run_report(*arguments: Any, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert outcome.exit_code == code, outcome.output
    return outcome.output


def test_table_has_chosen_columns(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    output = run_report(folder, "--metrics", "a_n, TASK_AWARE,top5,ece,plasticity")
    head = next(line for line in output.splitlines() if line.startswith("method"))
    assert head.split() == ["method", "A_N", "task_aware", "top5", "ECE", "plasticity", "seeds"]
    rows = {line.split()[0]: line for line in output.splitlines() if line[:3] in ("hgp", "fed")}
    assert all(f"{value}" in rows["hgp"] for value in ("70.0", "84.0", "96.0", "7.5", "85.0"))
    assert "–" in rows["fedavg"]  # its runs are of an older version
    assert "MB up" not in output and "ECE: expected calibration error" in output.replace("\n", " ")


def test_repeated_metrics_give_one_column(tmp_path: Path) -> None:
    folder = evaluated_run(tmp_path / "run")
    output = run_report(folder, "--metrics", "MB_up,A_N,mb-up,a_n,rounds@70,rounds@70")
    head = next(line for line in output.splitlines() if line.startswith("method"))
    assert head.split("  ")[0] == "method"
    assert head.count("A_N") == 1
    assert head.count("MB up") == 1
    assert head.count("rounds to 70 %") == 1


def test_default_table_has_default_columns(tmp_path: Path) -> None:
    output = run_report(evaluated_run(tmp_path / "run"))
    assert "BWT" in output
    assert "task_aware" not in output
    assert "plasticity" not in output


def test_intransigence_matches_hand_computation(tmp_path: Path) -> None:
    """Compare with joint training on the same seed, which also has 90 and 80 on new tasks.

    The second seed of hgp has no joint run, so it does not count. With a joint run of 92 and 86 the
    mean difference is (2 + 6) / 2 = 4.
    """
    folder = evaluated_run(tmp_path / "run")
    output = run_report(folder, "--metrics", "intransigence", "--format", "json")
    values = {row["method"]: row["values"] for row in json.loads(output)[0]["rows"]}
    assert values["hgp"]["intransigence"]["by_seed"] == {"0": 0.0}
    path = folder / "joint" / "seed0" / "result.json"
    content = json.loads(path.read_text())
    write_json(path, {**content, "accuracy": [[92.0], [85.0, 86.0]], "metrics": {}})
    output = run_report(folder, "--metrics", "intransigence", "--format", "json")
    values = {row["method"]: row["values"] for row in json.loads(output)[0]["rows"]}
    assert values["hgp"]["intransigence"]["by_seed"] == {"0": 4.0}
    assert values["hgp"].keys() == {"intransigence"}


def test_archive_keeps_metrics(tmp_path: Path) -> None:
    folder, archive = evaluated_run(tmp_path / "run"), tmp_path / "runs.csv"
    run_report(folder, "--archive", archive)
    csv = run_report(archive, "--metrics", "task_aware,top5,ECE", "--format", "csv")
    assert csv == run_report(folder, "--metrics", "task_aware,top5,ECE", "--format", "csv")
    assert "84.0,0.0,96.0,0.0,7.5,0.0" in csv


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--metrics", "topp5"), "no metric is called 'topp5'; did you mean top5"),
        (("--metrics", "top5", "--html", "x.html"), "--metrics is for printed tables only"),
        (("--metrics", ","), "--metrics names no metric; give one or more"),
        (
            ("--metrics", "rounds@150"),
            "'rounds@150' is not a metric; give an accuracy from 0 to 100",
        ),
        (("--metrics", "MB@x"), "'MB@x' is not a metric; give an accuracy from 0 to 100"),
    ],
)
def test_invalid_metrics_are_rejected(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    assert says in run_report(evaluated_run(tmp_path / "run"), *arguments, code=1)
