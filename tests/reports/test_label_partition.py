"""``fczoo.partition`` on labels of the user; ``--partition`` reads its file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fczoo
from fczoo.data.partition import make_partition
from fczoo.data.stream import make_stream

LABELS = ["dog", "cat", "cat", "dog", "ant"]
SAVED = [[0, 3], [1], [2, 4]]  # of each client


@pytest.fixture
def small_partition(tmp_path: Path) -> fczoo.LabelPartition:
    """Partition five labels by a file."""
    path = tmp_path / "by_hand.json"
    path.write_text(json.dumps(SAVED))
    return fczoo.partition(LABELS, f"file:{path}", clients=3)


def test_partition_file_gives_indices_and_counts(small_partition):
    assert [positions.tolist() for positions in small_partition.indices] == SAVED
    assert small_partition.classes == ("ant", "cat", "dog")
    assert small_partition.labels.tolist() == [2, 1, 1, 2, 0]
    assert small_partition.counts().tolist() == [[0, 0, 2], [0, 1, 0], [1, 1, 0]]
    assert small_partition.clients == 3
    assert repr(small_partition) == (
        "<LabelPartition indices, seed 0: 5 images of 3 classes over 3 clients>"
    )


@pytest.mark.parametrize(
    "spec", ["dirichlet:0.1", "iid", "quantity:2", "dirichlet:0.5,scope=dataset"]
)
def test_partition_equals_partition_of_dataset(spec):
    stream = make_stream("digits", tasks=1, pixels=False)
    expected = make_partition(stream, spec, 5, seed=3).tasks[0]
    split = fczoo.partition(stream.train.labels, spec, clients=5, seed=3)
    assert [a.tolist() for a in split.indices] == [a.tolist() for a in expected]
    other = fczoo.partition(stream.train.labels, spec, clients=5, seed=4)
    assert [a.tolist() for a in split.indices] != [a.tolist() for a in other.indices]
    assert split.counts().sum() == len(stream.train.labels)


def test_saved_partition_is_used_by_run(tmp_path):
    labels = make_stream("digits", pixels=False).train.labels
    split = fczoo.partition(labels, "dirichlet:0.1", clients=4)
    split.save(tmp_path / "split.json")
    again = fczoo.partition(labels, f"file:{tmp_path / 'split.json'}", clients=4)
    assert [a.tolist() for a in again.indices] == [a.tolist() for a in split.indices]
    settings = fczoo.Settings.for_dataset(
        "digits", partition=f"file:{tmp_path / 'split.json'}", clients=4, tasks=5
    )
    tasks = fczoo.Benchmark.open(settings).partition.tasks
    for client, positions in enumerate(split.indices):
        of_tasks = np.concatenate([task[client] for task in tasks])
        assert sorted(of_tasks.tolist()) == positions.tolist()


def test_partition_does_not_depend_on_label_type():
    numbers = [0, 0, 1, 1, 2, 2, 2, 2]
    expected = fczoo.partition(numbers, "dirichlet:0.5", clients=2)
    words = [["ant", "bee", "cow"][number] for number in numbers]
    kinds = (np.array(numbers, np.uint8), torch.tensor(numbers), words, np.array(words, object))
    for labels in kinds:
        split = fczoo.partition(labels, "dirichlet:0.5", clients=np.int64(2))
        assert [a.tolist() for a in split.indices] == [a.tolist() for a in expected.indices]
    assert split.classes == ("ant", "bee", "cow") and expected.classes == (0, 1, 2)


def test_natural_partition_uses_groups():
    hospitals = ["x", "y", "x", "y", "y"]
    split = fczoo.partition(LABELS, "natural", clients=2, groups=hospitals)
    assert sorted(a.tolist() for a in split.indices) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize("kind", ["heatmap", "bars", "bubbles"])
def test_partition_is_plotted(small_partition, kind):
    pytest.importorskip("matplotlib")
    figure = small_partition.plot(kind)
    axes = figure.axes[0]
    assert axes.get_title() == "indices, seed 0"
    words = [text.get_text() for axes in figure.axes for text in axes.get_xticklabels()]
    words += [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert {"ant", "cat", "dog"} <= {*words}
    if kind == "heatmap":
        assert axes.images[0].get_array().tolist() == [
            [None, None, 2],
            [None, 1, None],
            [1, 1, None],
        ]
    assert small_partition._repr_png_().startswith(b"\x89PNG")


def test_plot_needs_matplotlib(small_partition, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert small_partition._repr_png_() is None
    with pytest.raises(fczoo.FczooError, match=r"figures need matplotlib; run pip install"):
        small_partition.plot()


ADVICE = "must be a list of whole numbers or strings, one per image"


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        ([], {}, f"labels is empty; labels {ADVICE}"),
        ("abc", {}, f"labels is 'abc'; labels {ADVICE}"),
        (None, {}, f"labels is None; labels {ADVICE}"),
        ([[0, 1], [1, 0]], {}, f"labels has shape [2, 2]; labels {ADVICE}"),
        ([[0, 1], [1]], {}, f"labels cannot be converted to an array; labels {ADVICE}"),
        ([0, float("nan")], {}, f"labels contains 0.0; labels {ADVICE}"),
        (np.array(["a", None]), {}, f"labels contains None; labels {ADVICE}"),
        (["a", 1], {}, f"labels contains 1; labels {ADVICE}"),
        ([True, False], {}, f"labels contains True; labels {ADVICE}"),
        ([0, 1], {}, "labels has 2 images, fewer than 3 clients; lower clients"),
        (LABELS, {"clients": 0}, "clients is 0; it must be a whole number from 1 up"),
        (LABELS, {"clients": 2.5}, "clients is 2.5; it must be a whole number from 1 up"),
        (LABELS, {"seed": -1}, f"seed is -1; it must be a whole number from 0 to {2**63 - 1}"),
        (LABELS, {"spec": 0.1}, "spec is 0.1; give a partitioner such as 'dirichlet:0.1'"),
        (
            LABELS,
            {"spec": "dirichlt:0.1"},
            "no partitioner is called 'dirichlt'; did you mean dirichlet, dirichlet-size?",
        ),
        (LABELS, {"spec": "dirichlet:0"}, "dirichlet.beta is 0.0; it must be at least 1e-06"),
        (
            LABELS,
            {"spec": "natural"},
            "natural needs the group of each image; give them as groups=",
        ),
        (LABELS, {"groups": [0]}, "groups has 1 entry and labels has 5; give one group per image"),
        (LABELS, {"spec": "file:none.json"}, "no partition file at none.json"),
    ],
)
def test_invalid_arguments_are_rejected(labels, changes, message):
    values = {"spec": "iid", "clients": 3, **changes}
    with pytest.raises(fczoo.FczooError) as error:
        fczoo.partition(labels, values.pop("spec"), **values)
    assert str(error.value) == message


def test_saved_partition_of_other_labels_is_rejected(small_partition, tmp_path):
    small_partition.save(tmp_path / "saved.json")
    with pytest.raises(fczoo.FczooError, match="gives client 2 the index 4, which is not a train"):
        fczoo.partition(LABELS[:4], f"file:{tmp_path / 'saved.json'}", clients=3)
    with pytest.raises(fczoo.FczooError, match="another number of clients"):
        fczoo.partition(LABELS, f"file:{tmp_path / 'saved.json'}", clients=2)


def test_invalid_file_or_plot_kind_is_rejected(small_partition, tmp_path):
    for name, message in {
        "split.pkl": "is not a JSON file; give a name such as split.json",
        "none/split.json": "no folder .*none; create it first",
        "folder.json": "is a folder; give a file",
    }.items():
        (tmp_path / "folder.json").mkdir(exist_ok=True)
        with pytest.raises(fczoo.FczooError, match=message):
            small_partition.save(tmp_path / name)
    with pytest.raises(fczoo.FczooError, match="kind is 'pie'; it must be one of heatmap, bars"):
        small_partition.plot("pie")


def test_partition_does_not_import_torch(tmp_path):
    script = "import fczoo, sys; fczoo.partition([0, 1], 'iid', 2); print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert process.stdout == "False\n", process.stderr
