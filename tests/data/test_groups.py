"""Test groups of images (domains, hospitals, writers) and index lists as partitions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.data.partition import load_partition, make_partition
from fczoo.data.stream import make_stream
from fczoo.federation.data_setup import _first_classes, _join_streams, open_stream, partition_stream
from fczoo.runner.dry_run import _stream_of_expected_size
from helpers_datasets import domainnet
from helpers_partition import equal, toy_stream


def write_images(root: Path, names: list[str]) -> Path:
    """Write a small grey image under each name."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 2 * number, 0)).save(root / name)
    return root


def groups_of(root: Path) -> list[int] | None:
    groups = DATASETS.get("imagefolder")().load(root).groups
    return None if groups is None else groups.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two training images and a test image of each of two classes."""
    files = ["train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "train/dog/2.png"]
    return write_images(tmp_path, [*files, "test/cat/3.png", "test/dog/3.png"])


# ---------------------------------------------------------------- image folders


def test_groups_are_read_from_csv(folder: Path) -> None:
    assert groups_of(folder) is None
    lines = ["train/cat/1.png,north", "./train/cat/2.png,east", "train\\dog\\1.png,north"]
    text = "\n".join(["file,group", *lines, '"train/dog/2.png","b, west"', "test/cat/3.png,x"])
    (folder / "groups.csv").write_text(text)
    assert groups_of(folder) == [2, 1, 2, 0]  # of "b, west", east and north


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train/cat/1.png,a\n", "must be file,group, the names of its columns"),
        ("", "must be file,group, the names of its columns"),
        ("file,group\ntrain/cat/1.png,a\n", "gives no group to train/cat/2.png (3 such images)"),
        ("file,group\ntrain/cat/1.png\n", "/groups.csv is not FILE,GROUP; correct it"),
        ("file,group\na.png,b\n./a.png,c\n", "names a.png twice"),
        ("file,group\n../a.png,b\n", "may be outside of"),
    ],
)
def test_invalid_group_file_is_rejected(folder: Path, text: str, complaint: str) -> None:
    (folder / "groups.csv").write_text(text)
    with pytest.raises(FczooError) as caught:
        groups_of(folder)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_are_read_from_subfolders(tmp_path: Path) -> None:
    names = [f"{c}/{g}/{i}.png" for c in ("cat", "dog") for g in ("q", "p") for i in range(5)]
    root = write_images(tmp_path, names)
    data = DATASETS.get("imagefolder")().load(root)
    folders = [name.split("/")[1] for name in data.train.names]
    assert data.groups.tolist() == [int(folder == "q") for folder in folders]
    write_images(root, ["cat/6.png", "cat/7.png"])  # not in a folder of a group
    assert groups_of(root) is None


def test_natural_partition_command_gives_group_per_client(folder: Path, tmp_path: Path) -> None:
    lines = ["train/cat/1.png,a", "train/cat/2.png,b", "train/dog/1.png,b", "train/dog/2.png,b"]
    (folder / "groups.csv").write_text("\n".join(["file,group", *lines]))
    command = ["partition", "--dataset", "imagefolder", "--data-root", str(folder), "--tasks", "2"]
    words = [*command, "--partition", "natural", "--protocol", "none", "--clients"]
    outcome = CliRunner().invoke(main, [*words, "2", "--save", str(tmp_path / "p.json")])
    assert outcome.exit_code == 0, outcome.output
    assert load_partition(tmp_path / "p.json").counts().tolist() == [[1, 1], [0, 2]]
    assert "groups per client" in outcome.stdout
    second = CliRunner().invoke(main, [*words, "3"])
    assert second.exit_code == 1
    assert second.stderr == (
        "Error: only 2 groups have images, too few for 3 clients; lower --clients to 2 or fewer\n"
    )


# ---------------------------------------------------------------- domains


def test_domains_are_groups_with_class_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    domainnet(tmp_path)
    settings = Settings(
        dataset="domainnet", data_root=str(tmp_path), tasks=5, clients=6, partition="domains"
    )
    stream, partition = open_stream(settings, pixels=False)
    domains = DATASETS.get("domainnet")().load(tmp_path).train.domains
    assert np.array_equal(stream.groups, domains)
    for parts in partition.tasks:
        assert [np.unique(domains[part]).tolist() for part in parts] == [[k] for k in range(6)]
    moving = replace(settings, moving=1)
    stages, _ = partition_stream(moving, stream)
    assert np.array_equal(stages.groups, domains)  # not of stages
    small_stream = make_stream("domainnet", tmp_path, 5, train_per_class=1, pixels=False)
    assert np.array_equal(small_stream.groups, domains[small_stream.train_index])


def test_stream_of_expected_size_has_domains() -> None:
    settings = Settings(dataset="domainnet", tasks=5, clients=6, partition="domains")
    stream = _stream_of_expected_size(settings, 345, 3450)
    _, partition = partition_stream(settings, stream)
    assert partition.counts().sum(0).tolist() == [575] * 6  # 3450 / 6


def test_joined_datasets_have_distinct_groups() -> None:
    """Join the data of a stored model with new data.

    Image i of 8 is of class i modulo 4; groups 0 and 1 have four images each.
    """
    old = replace(toy_stream(per_class=2, train_index=np.arange(8)), groups=np.arange(8) // 4)
    new = replace(old, classes=tuple("efgh"))
    assert _first_classes(old, 1).groups.tolist() == [0, 1]
    assert _join_streams(old, new, Path()).groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert _join_streams(old, replace(new, groups=None), Path()).groups is None


# ---------------------------------------------------------------- lists of indices


def write_json(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"file:{path}"


def test_index_lists_define_partition(tmp_path: Path) -> None:
    """Split 8 images, where image i has class i modulo 4 and each task has two classes."""
    stream = toy_stream(per_class=2, train_index=np.arange(8))
    lists = [[5, 0, 2], [3, 1], [4, 6, 7]]
    for content in (lists, {str(client): part for client, part in enumerate(lists)}):
        partition = make_partition(stream, write_json(tmp_path / "p.json", content), 3, seed=9)
        tasks = [[part.tolist() for part in task] for task in partition.tasks]
        assert tasks == [[[0, 5], [1], [4]], [[2], [3], [6, 7]]]
        partition.save(tmp_path / "saved.json")
        assert equal(load_partition(tmp_path / "saved.json"), partition)
        assert equal(make_partition(stream, f"file:{tmp_path / 'saved.json'}", 3), partition)


@pytest.mark.parametrize(
    ("content", "clients", "complaint"),
    [
        ([[0, 1], [2, 8]], 2, "gives client 1 the index 8, which is not a training image"),
        ([[0, 1], [2, 2]], 2, "client 1 has an index twice"),
        ([[0, 1], [2, 3]], 3, "another number of clients (2) than this run (3)"),
        ([[0, 1], [4, 5]], 2, "gives no client an image of task 2"),
        ([[0, 1], [2, -3]], 2, "is not a valid partition file: [1][1]: Expected `int` >= 0"),
        ([[0, 1], [2, "a"]], 2, "is not a valid partition file"),
        ([0, 1], 2, "is not a valid partition file"),
        ([], 2, "it lists no client"),
        ({"1": [0], "2": [1]}, 2, "it has 2 clients, but no client 0"),
        ({"a": [0], "b": [1]}, 2, "is not a valid partition file"),
        ({"0": {"train": [0]}}, 1, "is not a valid partition file"),
        ("{", 1, "is not a valid partition file"),
    ],
)
def test_invalid_index_lists_are_rejected(
    content: object, clients: int, complaint: str, tmp_path: Path
) -> None:
    stream = toy_stream(per_class=2, train_index=np.arange(8))
    with pytest.raises(FczooError) as caught:
        make_partition(stream, write_json(tmp_path / "p.json", content), clients)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_partition_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FczooError, match=r"may run code .* write each client's indices as JSON"):
        make_partition(toy_stream(), f"file:{tmp_path / 'partition.pkl'}", 2)


def test_index_lists_with_stages(tmp_path: Path) -> None:
    spec = write_json(tmp_path / "p.json", [list(range(0, 1437, 2)), list(range(1, 1437, 2))])
    settings = Settings(dataset="digits", tasks=2, clients=2, moving=1, partition=spec)
    stream, partition = open_stream(settings, pixels=False)
    assert len(partition.tasks) == len(stream.tasks) == 3
    partition.save(tmp_path / "stages.json")
    again = replace(settings, partition=f"file:{tmp_path / 'stages.json'}")
    assert open_stream(again, pixels=False)[1].sha256 == partition.sha256
