"""Figures of papers: cells, pictures of tiny runs, and numbers computed by hand."""

import tomllib

import msgspec
import pytest
import torch

from fczoo.core.registry import create_method
from fczoo.federation.diagnostics import pair_distance, read
from fczoo.federation.settings import Settings
from fczoo.papers.figure_lists import sweep_commands
from fczoo.papers.paper_figures import find_figure, grid, paper_figures, pictures
from fczoo.runner.sweep import check_unique
from fczoo.runner.timing import inference_operations
from helpers_cli import TINY
from helpers_papers import output_of

ON_DIGITS = ["--protocol", "quick", "--dataset", "digits", "--seeds", "0", *TINY, "--tasks", "2"]


def test_every_figure_is_listed_and_has_cells():
    for name, figure in paper_figures().items():
        assert f"fczoo reproduce {name}" in output_of("reproduce", figure.paper)
        assert grid(figure)
    assert len(grid(find_figure("HGP/figA"))) == 14  # T1 has 14 methods other than Joint
    assert find_figure("hgp/T1") is None


def test_sweep_changes_one_value_at_a_time(monkeypatch, tmp_path):
    """Use one common cell for the start values of the four axes."""
    monkeypatch.chdir(tmp_path)
    output_of("reproduce", "fcilpt/fig8", "--methods", "nosuch", "--dry-run", code=1)
    cells = tomllib.loads((tmp_path / "results/fcilpt-Fig8.toml").read_text())["cells"]
    by_name = {cell["name"]: cell for cell in cells}
    assert len(cells) == 3 + 2 + 2 + 2 + 1
    printed = "fcilpt.query=embed_cls"
    values = ["fcilpt.size=20", "fcilpt.chosen=5", "fcilpt.length=5", "fcilpt.common_length=5"]
    assert by_name["fcilpt-centre"]["set"] == [printed, *values]
    assert by_name["fcilpt-size-10"]["set"] == [printed, "fcilpt.size=10", *values[1:]]
    words = [printed, *values[:3], "fcilpt.common_length=1"]
    assert by_name["fcilpt-common_length-1"]["set"] == words
    shared = [{cell[name] for cell in cells} for name in ("clients", "participation", "partition")]
    assert shared == [{"1"}, {"1"}, {"iid"}]
    message = output_of("reproduce", "fcilpt/fig8", "--reading", "print", code=1)
    assert "--reading does not apply to a figure; leave out --reading or fcilpt/Fig8" in message


@pytest.mark.parametrize(
    "name", [name for name, figure in paper_figures().items() if figure.draw != "inference"]
)
def test_figure_runs_are_valid_and_unique(name, monkeypatch, tmp_path):
    """Check that ``bench`` accepts the settings of each cell and that all cells differ."""
    monkeypatch.chdir(tmp_path)
    planned = []
    monkeypatch.setattr("fczoo.runner.sweep.check_unique", planned.append)
    monkeypatch.setattr("fczoo.runner.dry_run.dry_run", lambda *_: "")
    output_of("reproduce", name, "--dry-run")
    check_unique(planned[0])
    cells = {folder.parts[0] for folder in planned[0]}  # seeds may be a level below
    assert len(cells) == len(grid(find_figure(name)))


def test_dry_run_rejects_duplicate_cells(tmp_path):
    file = tmp_path / "same.toml"
    file.write_text('[[cells]]\nname = "a"\n[[cells]]\nname = "b"\nprotocol = "quick"\n')
    message = output_of("bench", "--config", str(file), "--methods", "fedncm", "--dry-run", code=1)
    assert "fedncm with seed 0 would run in a and in b; leave one out" in message


def test_pair_distance_matches_hand_computation():
    """Divide the mean distance (5 + 0) / 2 by the mean length (0 + 5 + 3 + 3) / 4 = 2.75."""
    prototypes = torch.tensor([[[0.0, 0.0], [3.0, 0.0]], [[3.0, 4.0], [3.0, 0.0]]])
    assert pair_distance(prototypes) == pytest.approx(2.5 / 2.75)


def test_inference_operations_match_hand_computation():
    """Count operations of ViT-B/16: 197 tokens, 768 dimensions, 12 blocks.

    The last block has only one output token. A product of n x k and k x m has 2 n k m operations.
    A prefix of 100 keys and values in five blocks adds operations only to the attention.
    """
    settings = Settings.for_dataset("cifar100", protocol="hgp")
    tokens, width = 197, 768
    attention = 2 * 2 * tokens * tokens * width
    block = 2 * tokens * 12 * width**2 + attention
    last = 2 * tokens * 3 * width**2 + 2 * 2 * tokens * width + 2 * 9 * width**2
    plain = 2 * 196 * width * width + 11 * block + last + 2 * width * 100
    assert inference_operations(create_method("fedavg"), settings) == plain
    prefixes = 5 * 2 * 2 * tokens * 100 * width
    hgp = create_method("hgp", prefix_len=100)
    assert inference_operations(hgp, settings) == plain + prefixes


def test_first_round_figure_draws_client_records(monkeypatch, tmp_path):
    """Draw two figures from one run; each client is evaluated on all test images."""
    monkeypatch.chdir(tmp_path)
    lines = output_of("reproduce", "hgp/Fig1", *ON_DIGITS).splitlines()
    out = tmp_path / "results/hgp-Fig1"
    assert "results/hgp-Fig1/hgp-Fig1-fedavg-fine-tuned.png" in lines
    folder = next(out.glob("*no-rebalance")) / "hgp/seed0"
    records = [record for record in read(folder) if record["kind"] == "first round"]
    assert [record["task"] for record in records] == [0, 1]
    assert records[0]["distance"] > 0
    assert all(sum(c["histogram"]) == 5 * 4 for c in records[0]["clients"])
    figure = find_figure("hgp/Fig1")
    heat = pictures(figure, out)[1]
    assert heat.values.tolist() == [c["histogram"] for c in records[0]["clients"]]
    (curves,) = pictures(msgspec.structs.replace(figure, draw="distances"), out)
    assert curves.curves["hgp (no-rebalance)"].tolist() == [[r["distance"] for r in records]]
    (points,) = pictures(msgspec.structs.replace(figure, draw="traffic", metric="FAA"), out)
    ((mb, _),) = points.points["fedavg (fine-tuned)"]
    assert 1 < mb < 5  # vit_nano_32 has 600,000 weights of 4 bytes


def test_inversion_figure_inverts_uploads_of_each_method(monkeypatch, tmp_path):
    """Attack other methods in the cell of the paper's method."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fczoo.runner.inversion_attack.descend", grey_images)
    cell = ["--cells", "hgp/cifar100/dirichlet:0.5", "--methods", "hgp,fedncm"]
    lines = output_of("reproduce", "hgp/AppD", *cell, *ON_DIGITS).splitlines()
    assert lines[-1] == "results/hgp-AppD/hgp-AppD-fedncm.pdf"
    rows = [line.split()[:2] for line in lines[-9:-4]]
    sent = {"hgp": ["feature", "prototype", "update"], "fedncm": ["feature", "prototype"]}
    assert rows == [[name, target] for name, targets in sent.items() for target in targets]
    message = output_of("reproduce", "hgp/AppD", "--cells", "*/ewcc", code=1)
    assert (
        "--cells */ewcc matches no cell of hgp/AppD; known: hgp/cifar100/dirichlet:0.5/ewc"
        in message
    )


def grey_images(_, like: torch.Tensor, number: int, steps: int) -> torch.Tensor:
    return torch.full_like(like, 0.5).expand(number, -1, -1, -1)


def test_sweep_figure_has_curve_over_values(make_run, tmp_path):
    """Draw means over two tasks; the accuracy on the second task is 80."""
    figure = find_figure("pilora/AppB1")
    for name, accuracy in zip(grid(figure), (10.0, 20.0, 30.0, 40.0, 50.0), strict=True):
        make_run(tmp_path / name, {"pilora": {0: accuracy, 1: accuracy + 2}})
    (curves,) = pictures(figure, tmp_path)
    assert curves.positions["pilora"].tolist() == [0, 3, 6, 9, 11]
    assert curves.curves["pilora"].tolist() == [[45, 50, 55, 60, 65], [46, 51, 56, 61, 66]]
    assert (curves.x, curves.y) == ("blocks", "A_N, %")


def test_combined_axes_give_curve_per_value(make_run, tmp_path):
    """Use the first axis as x; text values are at 1, 2, ..."""
    figure = find_figure("fppl/Fig4")
    names = list(grid(figure))
    assert names[:2] == ["fppl-partition-dirichlet_1-pool-true", names[0][:-4] + "false"]
    for i, name in enumerate(names):
        make_run(tmp_path / name, {"fppl": {2023: 2.0 * i}})
    (curves,) = pictures(figure, tmp_path)
    assert curves.curves["fppl (pool=true)"].tolist() == [[40, 42, 44, 46, 48]]
    assert curves.curves["fppl (pool=false)"].tolist() == [[41, 43, 45, 47, 49]]
    assert curves.ticks[0] == "dirichlet:1" and curves.positions["fppl (pool=true)"][0] == 1


def test_hyperparameter_figures_are_listed_as_sweeps(monkeypatch):
    """Check that the sweep commands cover the values of the figure's cells."""
    listing = output_of("reproduce")
    for name in ("pilora/Fig4", "pilora/AppB1", "fcilpt/Fig8", "fppl/Fig4"):
        assert f"fczoo reproduce {name}" in listing
    assert "fczoo reproduce pilora/Fig4" not in output_of("reproduce", "--paper", "hgp")
    assert "--sweep pilora.blocks=0,3,6,9,11" in output_of("reproduce", "pilora")
    planned = []
    monkeypatch.setattr("fczoo.runner.sweep.check_unique", planned.append)
    monkeypatch.setattr("fczoo.runner.dry_run.dry_run", lambda *_: "")
    counts = {"pilora/Fig4": [4, 4], "pilora/AppB1": [5], "fcilpt/Fig8": [4, 3, 3, 3]}
    for name, lengths in counts.items():
        for words in sweep_commands(find_figure(name)):
            output_of(*words, "--dry-run")
        assert [len(sweep) for sweep in planned] == lengths
        planned.clear()
    (words,) = sweep_commands(find_figure("fppl/Fig4"))
    assert words[-2:] == ["--sweep", "fppl.pool=true,false"]
    output_of(*words, "--seeds", "2023", "--dry-run")
    assert {(c[0].options["pool"], c[0].settings.partition) for c in planned[0].values()} == {
        (pool, f"dirichlet:{beta}") for pool in (True, False) for beta in (1, 0.5, 0.1, 0.05, 0.01)
    }
