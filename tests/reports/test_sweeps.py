"""``fczoo report --sweep``: rows by value, the best one, figures and errors.

The accuracy of a run is the mean of the given accuracy on the first task and 80.
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fczoo.board.plots import make_sweep_plot
from fczoo.reports.drawing import draw
from fczoo.reports.runs import read_experiments
from fczoo.reports.sweeps import find_sweeps, sweep_figures, sweep_table
from helpers_cli import run
from helpers_papers import output_of

MakeRun = Callable[..., Path]


@pytest.fixture
def rates(make_run: MakeRun, tmp_path: Path) -> Path:
    """Write runs with three rates; seed 1 is better by 10, 1 or 0.5 points in A_N."""
    for lr, first, second in ((0.1, 40.0, 60.0), (0.01, 60.0, 62.0), (0.002, 10.0, 11.0)):
        make_run(tmp_path / f"runs/{lr}", {"hgp": {0: first, 1: second}}, {"lr": lr, "rank": 4})
    make_run(tmp_path / "runs/others", {"fedncm": {0: 50.0}})
    return tmp_path / "runs"


def test_table_has_row_per_value_and_marks_best(rates: Path) -> None:
    text = run("report", str(rates), "--sweep")
    rows = [line.split() for line in text.splitlines() if line.startswith("0.")]
    assert [row[0] for row in rows] == ["0.002", "0.01", "0.1"]
    assert [row[1:4] for row in rows] == [
        ["45.2", "±", "0.4"],
        ["*70.5", "±", "0.7"],
        ["°65.0", "±", "7.1"],
    ]
    assert "\nbest A_N: 70.5 ± 0.7, with --set hgp.lr=0.01\n" in text
    assert text.startswith("HGP over hgp.lr\ndigits: 2 tasks") and "FedNCM" not in text
    assert "use fczoo tune, which does not use test images" in text


def test_first_metric_selects_best_in_every_format(rates: Path) -> None:
    words = ("report", str(rates), "--sweep", "--metrics", "forgetting,A_N", "--format")
    # the first task falls from 90 to 61 on average
    assert "best forgetting: 29.0 ± 1.4, with --set hgp.lr=0.01" in run(*words, "markdown")
    (sweep,) = json.loads(run(*words, "json"))
    assert (sweep["method"], sweep["axes"]) == ("hgp", ["hgp.lr"])
    assert [row["best"] for row in sweep["rows"]] == [False, True, False]
    assert sweep["rows"][2]["values"] == {"hgp.lr": 0.1}
    assert sweep["rows"][2]["metrics"]["A_N"]["by_seed"] == {"0": 60.0, "1": 70.0}
    rows = [*csv.DictReader(io.StringIO(run(*words, "csv")))]
    assert [row["options"] for row in rows] == ["hgp.lr=0.002", "hgp.lr=0.01", "hgp.lr=0.1"]
    assert [row["best"] for row in rows] == ["0", "1", "0"]
    assert float(rows[0]["A_N"]) == 45.25 and float(rows[2]["A_N std"]) == pytest.approx(50**0.5)
    latex = run(*words, "latex")
    assert r"\textbf{70.5 $\pm$ 0.7}" in latex and "\n lr " in latex
    assert r"% best forgetting: 29.0 ± 1.4, with --set hgp.lr=0.01" in latex


def test_methods_share_figure_over_setting(make_run: MakeRun, tmp_path: Path) -> None:
    for clients, hgp, pilora in ((2, 60.0, 40.0), (20, 50.0, 30.0), (5, 20.0, 10.0)):
        scores = {"hgp": {0: hgp}, "pilora": {0: pilora}}
        make_run(tmp_path / f"runs/{clients}", scores, clients=clients)
    sweeps = find_sweeps(read_experiments([tmp_path / "runs"]))
    assert [sweep.axes for sweep in sweeps] == [("clients",)] * 2
    assert run("report", str(tmp_path / "runs"), "--sweep").count("with --clients 2\n") == 2
    (figure,) = sweep_figures(sweeps)
    assert (figure.x, figure.y, list(figure.ticks)) == ("clients", "A_N, %", ["2", "5", "20"])
    curves = {label: values.tolist() for label, values in figure.curves.items()}
    assert curves == {"HGP": [[70.0, 50.0, 65.0]], "PILoRA": [[60.0, 45.0, 55.0]]}
    pytest.importorskip("matplotlib")
    (axes,) = draw(figure).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "5", "20"]
    assert axes.get_xticks().tolist() == [1, 2, 3]


def test_product_sweep_has_curve_per_value(make_run: MakeRun, tmp_path: Path) -> None:
    for i, (lr, blocks) in enumerate(
        [(lr, blocks) for lr in (0.1, 0.01) for blocks in ([0], [0, 1], [2])]
    ):
        make_run(tmp_path / f"runs/{i}", {"pilora": {0: 10.0 * i}}, {"lr": lr, "blocks": blocks})
    (sweep,) = find_sweeps(read_experiments([tmp_path / "runs"]))
    labels = ("0.01, 0", "0.01, 0,1", "0.01, 2", "0.1, 0", "0.1, 0,1", "0.1, 2")
    assert sweep_table(sweep).labels == labels
    (figure,) = sweep_figures([sweep])
    assert (figure.x, list(figure.ticks)) == ("blocks", ["0", "0,1", "2"])
    assert {label: values.tolist() for label, values in figure.curves.items()} == {
        "PILoRA (lr=0.01)": [[55.0, 60.0, 65.0]],
        "PILoRA (lr=0.1)": [[40.0, 45.0, 50.0]],
    }
    text = run("report", str(tmp_path / "runs"), "--sweep")
    assert "with --set pilora.lr=0.01 --set pilora.blocks=2\n" in text


def test_paired_values_give_one_curve(make_run: MakeRun, tmp_path: Path) -> None:
    for i, (lr, rank) in enumerate([(0.1, 8), (0.01, 4), (0.001, 4)]):
        make_run(tmp_path / f"runs/{i}", {"hgp": {0: 10.0 * i}}, {"lr": lr, "rank": rank})
    (figure,) = sweep_figures(find_sweeps(read_experiments([tmp_path / "runs"])))
    assert (figure.x, list(figure.ticks)) == ("lr, with rank", ["0.001", "0.01", "0.1"])
    assert figure.curves["HGP"].tolist() == [[50.0, 45.0, 40.0]]


def test_curves_separate_partitions_and_use_common_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    for i, (partition, lr, scores) in enumerate(
        [
            ("iid", 0.1, {0: 10.0, 1: 20.0}),
            ("iid", 0.01, {1: 30.0, 2: 40.0}),
            ("dirichlet:0.5", 0.1, {0: 50.0}),
            ("dirichlet:0.5", 0.01, {1: 60.0}),
        ]
    ):
        folder = tmp_path / f"runs/{i}"
        # written runs share one partition; the epochs keep them separate
        epochs = 1 if partition == "iid" else 2
        make_run(folder, {"hgp": scores}, {"lr": lr}, partition=partition, epochs=epochs)
    first, second = sweep_figures(find_sweeps(read_experiments([tmp_path / "runs"])))
    assert first.name == "sweep hgp.lr digits, iid"
    assert first.curves["HGP"].tolist() == [[55.0, 50.0]]
    assert second.name == "sweep hgp.lr digits, dirichlet:0.5"
    assert second.curves["HGP"].tolist() == [[70.0, 65.0]]
    assert np.array_equal(second.positions["HGP"], [1, 2])


def test_partition_is_axis_if_nothing_else_differs(make_run: MakeRun, tmp_path: Path) -> None:
    for i, partition in enumerate(("iid", "dirichlet:0.1")):
        scores = {"hgp": {0: 60.0 - 20 * i}, "fppl": {0: 50.0}}
        make_run(tmp_path / f"runs/{i}", scores, partition=partition)
    # written runs have the same images, so read each folder separately
    experiments = [e for i in (0, 1) for e in read_experiments([tmp_path / f"runs/{i}"])]
    sweeps = find_sweeps(experiments)
    assert [sweep.axes for sweep in sweeps] == [("partition",)] * 2
    (figure,) = sweep_figures(sweeps)
    assert figure.curves["HGP"].tolist() == [[70.0, 60.0]]


def test_sweep_figures_are_written(rates: Path, make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures"
    text = run("report", str(rates), "--sweep", "--figures", str(out))
    names = ["sweep-hgp.lr.png", "sweep-hgp.lr.pdf"]
    assert text.splitlines()[-2:] == [str(out / name) for name in names]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    plot = tmp_path / "plot.svg"
    run("plot", str(rates), "--kind", "sweep", "--out", str(plot))
    assert all(f">{word}</text>" in plot.read_text() for word in ("0.002", "0.01", "HGP", "lr"))
    for clients in (3, 4):  # a second sweep
        make_run(rates / f"more{clients}", {"fppl": {0: 1.0}}, clients=clients)
    experiments = read_experiments([rates])
    assert make_sweep_plot(experiments, "HGP").x == "lr"
    message = output_of("plot", str(rates), "--kind", "sweep", "--out", str(plot), code=1)
    assert "--kind sweep draws one sweep, but there are 2 (hgp.lr; clients)" in message
    words = ("--kind", "sweep", "--method", "glfc", "--out", str(plot))
    message = output_of("plot", str(rates), *words, code=1)
    assert message == "Error: no sweep has method 'glfc'; choose --method from: hgp, fppl\n"


def test_runs_without_sweep_are_rejected(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", {"hgp": {0: 50.0}, "pilora": {0: 60.0}})
    message = output_of("report", str(folder), "--sweep", code=1)
    assert message == (
        "Error: no method has runs with several values of an option or setting; run them with "
        "fczoo bench --sweep\n"
    )
    message = output_of("report", str(folder), "--sweep", "--columns", "data", code=1)
    assert "--sweep cannot be combined with --columns, --html or --archive" in message
    message = output_of("report", str(folder), "--figures", "x", code=1)
    assert message == "Error: --figures needs --html FILE or --sweep; add one\n"
    assert not Path("x").exists()
