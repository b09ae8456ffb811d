"""Curves over rounds and bytes, and columns of rounds and bytes to an accuracy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo.board.charts import chart
from fczoo.cli.app import main
from fczoo.federation.result import Result, read_result, write_result
from fczoo.reports.captions import describe
from fczoo.reports.drawing import draw
from fczoo.reports.figures import (
    accuracy_against_bytes,
    accuracy_against_seconds,
    client_quantiles,
    overview,
)
from fczoo.reports.learning_curves import (
    accuracy_over_bytes,
    accuracy_over_rounds,
    curve_points,
    megabytes_to,
    rounds_to,
)
from fczoo.reports.runs import read_experiments
from helpers_runs import write_run

CURVE = [[0, 2, 80.0, 1_000_000], [0, 4, 90.0, 2_000_000]]
CURVE += [[1, 2, 40.0, 3_000_000], [1, 4, 70.0, 4_500_000], [1, 4, 65.0, 5_000_000]]


def runs_with_curves(folder: Path, curves: dict[int, list[list[Any]]]) -> Path:
    """Write a run folder of hgp with the curve of each seed, and of fedavg without curves."""
    write_run(folder, {"hgp": dict.fromkeys(curves, 50.0), "fedavg": {0: 50.0}})
    for seed, curve in curves.items():
        path = folder / "hgp" / f"seed{seed}" / "result.json"
        result = read_result(path)
        result.curve = curve
        write_result(path, result)
    return folder


def sample(curve: list[list[Any]]) -> Result:
    return Result("hgp", {}, {}, 0, {}, {}, [0, 1], [1, 1], [1, 1], curve=curve)


def test_curve_points_count_rounds_over_all_tasks() -> None:
    points = curve_points(sample(CURVE))
    assert [p.rounds for p in points] == [2, 4, 6, 8, 8]
    assert [p.megabytes for p in points] == [1.0, 2.0, 3.0, 4.5, 5.0]
    assert curve_points(sample([])) == []


def test_rounds_and_bytes_to_accuracy_match_hand_computation() -> None:
    """Count only points of the last task, because earlier ones do not cover all classes."""
    result = sample(CURVE)
    assert (rounds_to(result, 40), megabytes_to(result, 40)) == (6, 3.0)
    assert (rounds_to(result, 40.5), megabytes_to(result, 70)) == (8, 4.5)
    assert (rounds_to(result, 80), megabytes_to(result, 80)) == (None, None)
    assert rounds_to(sample(CURVE[:2]), 40) is None


def test_curve_figures_match_hand_computation(tmp_path: Path) -> None:
    """Average over two seeds at their common points; the second seed has fewer."""
    other = [[0, 4, 70.0, 4_000_000], [1, 4, 55.0, 7_000_000]]
    (experiment,) = read_experiments([runs_with_curves(tmp_path / "r", {0: CURVE, 1: other})])
    over_rounds, over_bytes = accuracy_over_rounds(experiment), accuracy_over_bytes(experiment)
    assert over_rounds.curves.keys() == over_bytes.curves.keys() == {"hgp"}
    assert over_rounds.curves["hgp"].tolist() == [[90.0, 65.0], [70.0, 55.0]]
    assert over_rounds.positions["hgp"].tolist() == [4, 8]
    assert over_bytes.positions["hgp"].tolist() == [3.0, 6.0]
    assert chart(over_bytes)["series"][0]["points"] == [[3.0, 80.0], [6.0, 60.0]]
    (axes,) = draw(over_bytes).axes
    assert axes.lines[0].get_xydata().tolist() == [[3.0, 80.0], [6.0, 60.0]]
    assert {"accuracy over rounds", "accuracy over bytes"} <= {
        figure.name for figure in overview(experiment)
    }


def test_runs_without_curves_have_no_curve_figure(tmp_path: Path) -> None:
    (experiment,) = read_experiments([write_run(tmp_path / "r", {"hgp": {0: 50.0}})])
    assert not any(figure.name.startswith("accuracy over") for figure in overview(experiment))


def test_methods_without_rounds_are_drawn_over_bytes(tmp_path: Path) -> None:
    curve = [[0, 0, 90.0, 1_000_000], [1, 0, 60.0, 2_000_000]]
    (experiment,) = read_experiments([runs_with_curves(tmp_path / "r", {0: curve})])
    assert not accuracy_over_rounds(experiment).curves
    assert np.array_equal(accuracy_over_bytes(experiment).positions["hgp"], [1.0, 2.0])


def test_compressed_runs_have_separate_points_over_bytes(tmp_path: Path) -> None:
    """Give each compression its own table; figures over bytes show all with their names."""
    runs_with_curves(tmp_path / "exact", {0: CURVE})
    write_run(tmp_path / "topk", {"hgp": {0: 60.0}}, compress="topk:0.01")
    write_run(tmp_path / "other", {"hgp": {0: 70.0}}, compress="int8", rounds=9)
    by_code = {e.settings["compress"]: e for e in read_experiments([tmp_path])}
    assert [line.label for line in by_code["topk:0.01"].lines] == ["hgp"]
    assert "uploads compressed by topk:0.01" in describe(by_code["topk:0.01"])
    points = {code: accuracy_against_bytes(e).points for code, e in by_code.items()}
    assert points[None].keys() == {"hgp", "fedavg", "hgp, topk:0.01"}
    assert points["topk:0.01"].keys() == {"hgp", "hgp, exact", "fedavg, exact"}
    assert points["int8"].keys() == {"hgp"}  # it has another number of rounds
    assert points[None]["hgp, topk:0.01"].tolist() == points["topk:0.01"]["hgp"].tolist()
    assert accuracy_over_bytes(by_code["topk:0.01"]).curves.keys() == {"hgp, exact"}
    assert "hgp, exact" not in accuracy_against_seconds(by_code["topk:0.01"]).points


@pytest.mark.parametrize("archived", [False, True])
def test_report_has_columns_for_target_accuracy(tmp_path: Path, archived: bool) -> None:
    """Show a value only if all seeds reach the accuracy."""
    slower = [[0, 4, 70.0, 4_000_000], [1, 4, 55.0, 7_000_000]]
    folder = runs_with_curves(tmp_path / "r", {0: CURVE, 1: slower})
    if archived:
        archive = tmp_path / "runs.csv"
        assert (
            not CliRunner()
            .invoke(main, ["report", str(folder), "--archive", str(archive)])
            .exception
        )
        folder = archive
    words = ["report", str(folder), "--metrics", "rounds@50,MB@50,rounds to 60 %", "--format"]
    outcome = CliRunner().invoke(main, [*words, "json"])
    values = {row["method"]: row["values"] for row in json.loads(outcome.output)[0]["rows"]}
    assert values["hgp"]["rounds to 50 %"]["by_seed"] == {"0": 8.0, "1": 8.0}
    assert values["hgp"]["MB to 50 %"]["mean"] == pytest.approx((4.5 + 7) / 2)
    assert values["hgp"]["rounds to 60 %"] is None and values["fedavg"]["MB to 50 %"] is None
    text = CliRunner().invoke(main, [*words, "text"]).output
    assert (
        "MB to 50 %: MB sent in the run until the accuracy on all classes reaches 50 %"
        in " ".join(text.split())
    )


@pytest.mark.parametrize("curve", [[[0, 1, 50.0]], [[0, 1, 101.0, 5]], [[0, -1, 50.0, 5]], [["a"]]])
def test_damaged_curve_is_rejected(tmp_path: Path, curve: list[list[Any]]) -> None:
    folder = runs_with_curves(tmp_path / "r", {0: curve})
    outcome = CliRunner().invoke(main, ["report", str(folder)])
    assert outcome.exit_code == 1 and "is not a valid result file" in str(outcome.output)


def test_client_quantiles_are_interpolated(tmp_path: Path) -> None:
    """Interpolate between five clients: quantiles 0, 5, ..., 100 %."""
    folder = runs_with_curves(tmp_path / "r", {0: CURVE})
    path = folder / "hgp" / "seed0" / "result.json"
    result = read_result(path)
    result.client_accuracy = [50.0, 10.0, None, 30.0, 20.0, 40.0]
    write_result(path, result)
    (experiment,) = read_experiments([folder])
    quantiles = client_quantiles(experiment)
    assert quantiles.curves["hgp"][0] == pytest.approx(np.arange(10, 51, 2))
    assert "clients" in {figure.name for figure in overview(experiment)}
    words = ["report", str(folder), "--metrics", "client_mean,client_worst,client_std"]
    outcome = CliRunner().invoke(main, [*words, "--format", "json"])
    values = {row["method"]: row["values"] for row in json.loads(outcome.output)[0]["rows"]}
    means = [entry["mean"] for entry in values["hgp"].values()]
    assert means == pytest.approx([30.0, 10.0, 200**0.5])
