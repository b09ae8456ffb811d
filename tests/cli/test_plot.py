"""Test ``fczoo plot``: sizes, labels and colours of figures, and its errors."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fczoo.board.plots import colour_numbers, make_plot, write_plot
from fczoo.core.errors import FczooError
from fczoo.reports.figure_data import HeatMap
from fczoo.reports.runs import read_experiments
from helpers_cli import TINY, run
from helpers_papers import output_of

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    scores = {"pilora": {0: 60.0, 1: 62.0}, "codap": {0: 50.0, 1: 40.0}}
    return make_run(tmp_path / "run", scores)


def error_of(folder: Path, *words: str) -> str:
    out = folder.parent / "plot.pdf"
    message = output_of("plot", str(folder), "--out", str(out), *words, code=1)
    assert not out.exists()
    return message


def test_column_figure_has_size_text_and_paper_names(runs: Path) -> None:
    out = runs.parent / "curves.svg"
    run("plot", str(runs), "--kind", "curves", "--out", str(out))
    text = out.read_text()
    assert f'width="{3.3 * 72:g}pt"' in text
    assert all(f">{word}</text>" in text for word in ("PILoRA", "CODA-P", "accuracy, %"))
    sizes = set(re.findall(r"font(?:-size)?: ([\d.]+)px", text))
    assert sizes == {"8"}  # points of the figure
    assert "<title>" not in text
    run("plot", str(runs), "--kind", "curves", "--out", str(out))
    assert out.read_text() == text


def test_method_has_same_colour_in_all_figures(runs: Path, make_run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", {"fppl": {0: 1.0}, "pilora": {0: 2.0}}, rounds=3)
    first, second = (colour_numbers(read_experiments([x])[0]) for x in (runs, other))
    assert first["PILoRA"] == second["PILoRA"]
    assert len({*first.values(), *second.values()}) == 3


def test_rows_of_one_method_have_no_fixed_colours(make_run, tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{size}", {"l2p": {0: 1.0}}, {"size": size}) for size in (5, 10)
    ]
    (experiment,) = read_experiments(folders)
    assert len(experiment.lines) == 2 and colour_numbers(experiment) == {}


def test_heat_map_numbers_fit_cells(tmp_path: Path) -> None:
    """Give each of ten cells 16.56 points of (3.3 - 1) inches; "100" takes 3 x 0.6 x 8 points."""
    pytest.importorskip("matplotlib")
    for columns, size in ((10, 8), (20, 72 * 2.3 / 20 / 1.8)):
        heat = HeatMap(
            name="a",
            caption="",
            x="x",
            y="y",
            values=np.full((2, columns), 100.0),
            rows=["1", "2"],
            columns=["1"] * columns,
            colours="green",
        )
        write_plot(heat, tmp_path / "heat.svg")
        sizes = re.findall(
            r"font(?:-size)?: ([\d.]+)px[^>]*>100<", (tmp_path / "heat.svg").read_text()
        )
        assert [float(x) for x in sizes] == pytest.approx([size] * (2 * columns), abs=0.01)


def test_plot_draws_features_and_confusion_of_one_method(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("bench", "--methods", "fedncm,fedlda", *TINY, "--out", str(folder))
    (experiment,) = read_experiments([folder])
    assert make_plot(experiment, "confusion", "FedNCM").name == "confusion of classes fedncm"
    for kind in ("tsne", "heatmap"):
        out = tmp_path / f"{kind}.png"
        run("plot", str(folder), "--kind", kind, "--method", "fedlda", "--out", str(out))
        assert out.read_bytes().startswith(b"\x89PNG")


def test_invalid_plot_options_are_rejected(runs: Path, make_run, tmp_path: Path) -> None:
    message = "--kind heatmap shows one row; choose --method from: pilora, codap"
    assert message in error_of(runs, "--kind", "heatmap")
    message = "no row has method 'hgp'; choose --method from: pilora, codap"
    assert message in error_of(runs, "--kind", "heatmap", "--method", "hgp")
    assert "no run recorded the data of --kind rounds" in error_of(runs, "--kind", "rounds")
    unrecorded = error_of(runs, "--kind", "confusion", "--method", "pilora")
    assert "no confusion matrix of pilora: it needs run folders (archives" in unrecorded
    make_run(tmp_path / "other", {"pilora": {0: 1.0}}, rounds=3)
    message = error_of(tmp_path, "--kind", "curves")
    assert "these runs belong to 2 tables, and a figure shows one" in message
    for name, reason in (
        ("plot.gif", "must end with .pdf, .svg or .png"),
        ("none/plot.pdf", "no folder"),
    ):
        words = ("plot", str(runs), "--kind", "curves", "--out", str(tmp_path / name))
        assert reason in output_of(*words, code=1)


def test_tsne_requires_stored_model(runs: Path) -> None:
    (experiment,) = read_experiments([runs])
    with pytest.raises(FczooError, match="t-SNE needs the model of a run"):
        make_plot(experiment, "tsne", "pilora", lambda *_: pytest.fail("opened"))
