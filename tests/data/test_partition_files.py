"""Test partition files: save, load, reuse and damage."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.data.partition import Partition, load_partition, make_partition
from fczoo.data.stream import Stream
from helpers_partition import equal, toy_stream


@pytest.fixture
def partition_file(tmp_path: Path) -> Path:
    path = tmp_path / "split.json"
    make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4).save(path)
    return path


def test_save_and_load(partition_file: Path) -> None:
    original = make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4)
    copy = load_partition(partition_file)
    assert equal(copy, original) and copy.sha256 == original.sha256
    assert copy.class_order == (2, 0, 3, 1)
    assert copy.tasks[0][0].dtype == np.int64


def test_other_class_order_suggests_natural_order(tmp_path: Path) -> None:
    natural = toy_stream(order=(0, 1, 2, 3))
    make_partition(natural, "dirichlet:0.3", 3, seed=4).save(tmp_path / "split.json")
    message = "has the original label 0 in the file, 2 in the run; use --class-order natural"
    with pytest.raises(FczooError, match=message):
        make_partition(toy_stream(), f"file:{tmp_path / 'split.json'}", 3, seed=4)


def test_client_without_images_is_saved(tmp_path: Path) -> None:
    partition = Partition(
        "toy", "by hand", 0, (0, 1), ((np.array([3, 5]), np.array([], np.int64)),)
    )
    partition.save(tmp_path / "p.json")
    copy = load_partition(tmp_path / "p.json")
    assert equal(copy, partition) and copy.counts().tolist() == [[2, 0]]


def test_partition_file_restores_partition(partition_file: Path) -> None:
    stream = toy_stream()
    copy = make_partition(stream, f"file:{partition_file}", 3, seed=99)
    assert equal(copy, make_partition(stream, "dirichlet:0.3", 3, seed=4))


@pytest.mark.parametrize(
    ("stream", "clients", "complaint"),
    [
        (toy_stream(name="other"), 3, "another data set"),
        (
            toy_stream(order=(0, 1, 2, 3)),
            3,
            "class order than this run: class 1 in order of arrival has the original label 2 in "
            "the file, 0 in the run; use the --class-order or",
        ),
        (toy_stream(tasks=4), 3, "another number of tasks"),
        (toy_stream(), 4, "another number of clients"),
        (
            toy_stream(train_index=2 * np.arange(48)),
            3,
            "names images that task 1 of this run does not have",
        ),
    ],
)
def test_partition_file_of_other_data_is_rejected(
    partition_file: Path, stream: Stream, clients: int, complaint: str
) -> None:
    with pytest.raises(FczooError, match=complaint):
        make_partition(stream, f"file:{partition_file}", clients)


def test_folder_as_partition_file_is_rejected(partition_file: Path) -> None:
    folder = partition_file.parent
    problem = f"{folder} is a folder, not a partition file; give"
    with pytest.raises(FczooError) as caught:
        make_partition(toy_stream(), f"file:{folder}", 3)
    assert str(caught.value) == f"{problem} a JSON file, such as partition.json in a run folder"
    partition_file.rename(folder / "partition.json")
    with pytest.raises(FczooError) as caught:
        load_partition(folder)
    assert str(caught.value) == f"{problem} {folder / 'partition.json'}"


def test_partition_file_without_path_is_rejected() -> None:
    with pytest.raises(FczooError) as caught:
        make_partition(toy_stream(), "file:", 3)
    assert str(caught.value) == "--partition file: names no file; write file:RUN/partition.json"


def test_partition_file_with_empty_task_is_rejected(tmp_path: Path) -> None:
    stream, nothing = toy_stream(), np.array([], np.int64)
    first = stream.train_index[stream.positions(stream.train, stream.tasks[0])]
    Partition("toy", "by hand", 0, stream.class_order, ((first, nothing), (nothing, nothing))).save(
        tmp_path / "p.json"
    )
    with pytest.raises(FczooError, match="gives no client an image of task 2"):
        make_partition(stream, f"file:{tmp_path / 'p.json'}", 2)


def test_hash_depends_on_every_part() -> None:
    tasks = ((np.array([0, 1]), np.array([2])),)
    base = Partition("toy", "iid", 0, (0, 1), tasks)
    others = [
        Partition("toys", "iid", 0, (0, 1), tasks),
        Partition("toy", "iid:", 0, (0, 1), tasks),
        Partition("toy", "iid", 1, (0, 1), tasks),
        Partition("toy", "iid", 0, (1, 0), tasks),
        Partition("toy", "iid", 0, (0, 1), ((np.array([0]), np.array([1, 2])),)),
        Partition("toy", "iid", 0, (0, 1), ((np.array([0, 1]), np.array([3])),)),
    ]
    assert len({p.sha256 for p in [base, *others]}) == 7
    assert (
        Partition("toy", "iid", 0, (0, 1), ((np.array([0, 1]), np.array([2])),)).sha256
        == base.sha256
    )


def edit_json(path: Path, **changes: object) -> None:
    """Change values in a JSON file without updating its checksum."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def test_edited_partition_file_is_rejected(partition_file: Path) -> None:
    content = json.loads(partition_file.read_text())
    moved_tasks = [[[*task[0][1:]], [task[0][0], *task[1]], task[2]] for task in content["tasks"]]
    for change in (
        {"tasks": moved_tasks},
        {"seed": 5},
        {"spec": "iid"},
        {"dataset": "other"},
        {"class_order": [0, 1, 2, 3]},
        {"sha256": "0" * 64},
    ):
        partition_file.write_text(json.dumps(content))
        load_partition(partition_file)
        edit_json(partition_file, **change)
        with pytest.raises(FczooError, match="does not match its sha256"):
            load_partition(partition_file)


VALID_START = '{"format": "fczoo-partition-1", "tasks": [[[0]]], "dataset": "toy", "spec": "iid", '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "12",
        '"text"',
        "not json",
        "\x00",
        "[" * 100_000,
        '{"format": "fczoo-partition-0"}',
        '{"format": "fczoo-partition-1"}',
        '{"format": "fczoo-partition-1", "tasks": []}',
        '{"format": "fczoo-partition-1", "tasks": [[]]}',
        '{"format": "fczoo-partition-1", "tasks": {"a": 1}}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]], [[1], [2]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[["a"]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[null]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[[0], [1, 2]]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[99999999999999999999999]]]}',
        VALID_START + '"seed": Infinity, "class_order": []}',
        VALID_START + '"seed": null, "class_order": []}',
        VALID_START + '"seed": 0, "class_order": null}',
        VALID_START + '"seed": 0, "class_order": ["a"]}',
    ],
    ids=lambda text: text[:60],
)
def test_malformed_partition_file_is_rejected(partition_file: Path, text: str) -> None:
    partition_file.write_text(text)
    with pytest.raises(FczooError, match="is not a valid partition file"):
        load_partition(partition_file)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FczooError, match="no partition file"):
        load_partition(tmp_path / "missing.json")


def test_partition_file_with_invalid_text_is_rejected(partition_file: Path) -> None:
    partition_file.write_bytes(b"\xff\xfe" + partition_file.read_bytes())
    with pytest.raises(FczooError, match="is not a valid partition file"):
        load_partition(partition_file)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_partition_file_is_restored_or_rejected(
    partition_file: Path, data: st.DataObject
) -> None:
    """Load an equal partition from a damaged file or raise ``FczooError``.

    Bytes are cut off, changed, inserted or removed.
    """
    original = make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4)
    original.save(partition_file)
    content = bytearray(partition_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["cut", "change", "insert", "delete"])):
            case "cut":
                del content[at:]
            case "change":
                content[at : at + 1] = data.draw(
                    st.binary(min_size=1, max_size=2)
                    | st.sampled_from([b"0", b"9", b",", b"[", b"]", b"-", b".", b'"'])
                )
            case "insert":
                content[at:at] = data.draw(
                    st.binary(min_size=1, max_size=4)
                    | st.sampled_from([b"0", b"1e99", b"[", b"]", b"null,", b"NaN,", b"{}"])
                )
            case "delete":
                del content[at : at + data.draw(st.integers(1, 8))]
    partition_file.write_bytes(content)
    try:
        copy = load_partition(partition_file)
    except FczooError:
        return
    assert equal(copy, original)


# ---------------------------------------------------------------- warnings of a saved partition


def test_partition_file_warns_of_unused_and_shared_images(tmp_path: Path, caplog) -> None:
    stream = toy_stream()
    make_partition(stream, "iid", 3).save(tmp_path / "whole.json")
    make_partition(stream, f"file:{tmp_path / 'whole.json'}", 3)
    assert not caplog.records
    tasks = tuple(
        tuple(
            stream.train_index[stream.positions(stream.train, t)][part]
            for part in (slice(0, 10), slice(5, 20))
        )
        for t in stream.tasks
    )
    Partition("toy", "by hand", 0, stream.class_order, tasks).save(tmp_path / "p.json")
    make_partition(stream, f"file:{tmp_path / 'p.json'}", 2)
    assert caplog.messages == [
        "the saved partition gives 8 of 48 training images to no client",
        "the saved partition gives 10 of 48 training images to several clients",
    ]
