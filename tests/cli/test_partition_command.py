"""Test ``fczoo partition``: it shows and writes the partition of a bench."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.data.partition import load_partition
from fczoo.data.stream import make_stream
from fczoo.reports.drawing import picture_class
from fczoo.reports.partition_figure import draw_bars, draw_bubbles

SPLIT = [
    "--partition",
    "dirichlet:0.3",
    "--clients",
    "4",
    "--tasks",
    "4,3,3",
    "--class-order-seed",
    "3",
    "--partition-seed",
    "5",
]


def invoke(*arguments: str) -> str:
    outcome = CliRunner().invoke(main, ["partition", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


@pytest.fixture(scope="module")
def split_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("split")
    files = [
        argument
        for kind, name in (("save", "p.json"), ("table", "p.csv"), ("export", "e.json"))
        for argument in (f"--{kind}", str(folder / name))
    ]
    return folder, invoke(*SPLIT, "--full", *files)


def test_partition_matches_bench(split_files, tmp_path):
    folder, output = split_files
    short = ["--rounds", "1", "--epochs", "1", "--out", str(tmp_path / "run")]
    outcome = CliRunner().invoke(main, ["bench", "--methods", "fedncm", *SPLIT, *short])
    assert outcome.exit_code == 0, outcome.output
    partition = load_partition(folder / "p.json")
    assert load_partition(tmp_path / "run" / "partition.json").sha256 == partition.sha256
    assert f"sha256 {partition.sha256}" in output


def test_table_counts_match_partition(split_files):
    folder, output = split_files
    partition, stream = (
        load_partition(folder / "p.json"),
        make_stream("digits", tasks=(4, 3, 3), class_order_seed=3),
    )
    rows = list(csv.DictReader((folder / "p.csv").open()))
    assert sum(int(r["images"]) for r in rows) == 1437
    for row in rows:
        positions = partition.tasks[int(row["task"])][int(row["client"])]
        assert (
            int(row["images"])
            == (
                np.array(stream.class_order)[stream.train.labels[positions]] == int(row["class"])
            ).sum()
            > 0
        )
    assert output.count("images per client and class") == 3
    for task, counts in zip(stream.tasks, partition.counts(), strict=True):
        table = output.split(f"Task {task.index + 1}, images per client and class")[1]
        assert [int(line.split()[-1]) for line in table.splitlines()[3:8]] == [
            *counts,
            counts.sum(),
        ]
        assert table.splitlines()[1].split() == [
            "client",
            *map(str, stream.class_order[task.start : task.stop]),
            "all",
        ]


def test_export_has_original_positions_and_labels(split_files):
    """Export positions in the order of the data set, with its original labels.

    Reading the file does not need fczoo.
    """
    folder, _ = split_files
    content, labels = (
        json.loads((folder / "e.json").read_text()),
        DATASETS.get("digits")().load(Path()).train.labels,
    )
    assert [len(t["classes"]) for t in content["tasks"]] == [4, 3, 3]
    assert content["class_names"] == {str(c): str(c) for c in range(10)}
    positions = []
    for task in content["tasks"]:
        assert list(task["clients"]) == ["0", "1", "2", "3"]
        for part in task["clients"].values():
            assert labels[part["indices"]].tolist() == part["labels"]
            assert set(part["labels"]) <= set(task["classes"])
            positions += part["indices"]
    assert sorted(positions) == list(range(1437))
    assert content["sha256"] == load_partition(folder / "p.json").sha256


def test_heat_map_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    invoke(*SPLIT, "--plot", str(tmp_path / "p.png"))
    with Image.open(tmp_path / "p.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


COUNTS = np.array([[9, 0, 4, 0], [0, 1, 0, 0], [2, 2, 2, 2]])  # [clients, classes]


@pytest.fixture
def axes():
    pytest.importorskip("matplotlib")
    return picture_class()().subplots()


def test_bars_are_stacked_by_class(axes):
    """Draw for client 0 a bar from 0 to 9 of class 0 and one from 9 to 13 of class 2."""
    draw_bars(axes, COUNTS, "abcd", "class")
    (bars,) = axes.collections
    corners = [path.vertices[:4].tolist() for path in bars.get_paths()]
    assert corners[0] == [[0, -0.4], [9, -0.4], [9, 0.4], [0, 0.4]]
    assert corners[1] == [[9, -0.4], [13, -0.4], [13, 0.4], [9, 0.4]]
    assert corners[2] == [[0, 0.6], [1, 0.6], [1, 1.4], [0, 1.4]]
    assert len(corners) == 7 and bars.get_array().tolist() == [0, 2, 1, 0, 1, 2, 3]
    legend = axes.figure.axes[1]
    assert [label.get_text() for label in legend.get_yticklabels()] == list("abcd")


def test_bubble_area_is_proportional_to_images(axes):
    draw_bubbles(axes, COUNTS, cell=20)
    (bubbles,) = axes.collections
    assert bubbles.get_offsets().tolist()[:3] == [[0, 0], [2, 0], [1, 1]]
    areas = bubbles.get_sizes()
    assert areas[0] == pytest.approx(19**2)  # the largest fills 0.95 of a cell's width
    assert areas / areas[0] * 9 == pytest.approx([9, 4, 1, 2, 2, 2, 2])


def test_equal_bubbles_have_one_legend_entry(axes):
    draw_bubbles(axes, np.full((2, 3), 7), cell=20)
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["7"]


@pytest.mark.parametrize(("kind", "end"), [("bars", "svg"), ("bubbles", "pdf")])
def test_plot_kinds_are_written(kind, end, tmp_path):
    pytest.importorskip("matplotlib")
    invoke(*SPLIT, "--plot", str(tmp_path / f"p.{end}"), "--plot-kind", kind)
    assert (tmp_path / f"p.{end}").stat().st_size > 5000


def test_plot_kind_without_plot_is_rejected():
    outcome = CliRunner().invoke(main, ["partition", *SPLIT, "--plot-kind", "bars"])
    assert outcome.exit_code == 1
    assert outcome.stderr == "Error: --plot-kind needs --plot FILE; add it\n"


def test_plot_requires_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = CliRunner().invoke(main, ["partition", *SPLIT, "--plot", str(tmp_path / "p.png")])
    assert outcome.exit_code == 1
    assert outcome.stderr == "Error: figures need matplotlib; run pip install 'fczoo[plot]'\n"


def test_joining_clients_grow_population(tmp_path):
    output = invoke(
        "--partition",
        "overlap:0.5",
        "--clients",
        "30",
        "--joining",
        "10",
        "--transition",
        "0.9",
        "--export",
        str(tmp_path / "e.json"),
    )
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert [(int(r[3]), int(r[4])) for r in rows] == [
        (30, 30),
        (40, 37),
        (50, 46),
        (60, 55),
        (70, 64),
    ]  # int(0.9 n) + 10
    assert "--full prints them" in output and "original labels" not in output
    assert [len(t["clients"]) for t in json.loads((tmp_path / "e.json").read_text())["tasks"]] == [
        30,
        40,
        50,
        60,
        70,
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--clients", "5000"], "lower --clients"),
        (["--partition", "shards:2"], None),
        (["--partition", "shards:2,shards=500"], "cannot be cut into 500 shards"),
        (
            ["--partition", "dirichlet:0.5,scope=dataset", "--joining", "1"],
            "needs the same clients in every task",
        ),
        (["--partition", "file:nowhere.json"], "no partition file"),
        (["--save", "missing/p.json"], "missing/p.json"),
    ],
)
def test_partition_options_are_checked(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["partition", *arguments])
    if says is None:
        assert outcome.exit_code == 0
    else:
        assert outcome.exit_code == 1
        assert says in outcome.stderr
        assert outcome.stderr.count("\n") == 1
