"""Test partitions of a stream: tasks, impossible requests and many clients."""

import numpy as np
import pytest

from fczoo import FczooError, Task
from fczoo.data.dataset import Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream
from helpers_partition import equal, toy_stream


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "quantity:1"])
def test_partition_covers_each_task(spec: str) -> None:
    stream = toy_stream()
    partition = make_partition(stream, spec, 3, seed=4)
    assert (partition.dataset, partition.spec, partition.seed, partition.clients) == (
        "toy",
        spec,
        4,
        3,
    )
    assert partition.counts().shape == (2, 3)
    assert partition.counts().sum(1).tolist() == [24, 24]
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        positions = np.concatenate(parts)
        assert np.array_equal(
            np.sort(positions), stream.train_index[stream.positions(stream.train, task)]
        )
        assert all(np.array_equal(p, np.sort(p)) for p in parts)
    assert equal(partition, make_partition(stream, spec, 3, seed=4))
    assert partition.sha256 == make_partition(stream, spec, 3, seed=4).sha256
    second = make_partition(stream, spec, 3, seed=5)
    assert not equal(partition, second) and partition.sha256 != second.sha256


def test_tasks_are_split_independently() -> None:
    """Split the second task differently from the first."""
    partition = make_partition(toy_stream(), "dirichlet:0.3", 3)
    stream = toy_stream()
    places = [
        [np.searchsorted(np.sort(np.concatenate(t)), p).tolist() for p in t]
        for t in partition.tasks
    ]
    assert places[0] != places[1]
    single_task = make_partition(toy_stream(tasks=1), "dirichlet:0.3", 3)
    assert len(single_task.tasks) == 1
    assert single_task.counts().sum() == len(stream.train.labels)


@pytest.mark.parametrize(
    ("spec", "clients", "complaint"),
    [
        ("iid", 25, "24 training images for 25 clients"),
        ("dirichlet:0.5", 25, "24 training images for 25 clients"),
        ("iid", 0, "clients is 0; it must be at least 1"),
        ("iid", -3, "clients is -3; it must be at least 1"),
        ("quantity:3", 4, "more classes than the 2 of a task"),
        ("quantity:1", 1, "cannot cover the 2 classes"),
        ("dirchlet:0.5", 3, "did you mean dirichlet"),
        ("file:nowhere.json", 3, "no partition file at nowhere.json"),
    ],
)
def test_impossible_partitions_are_rejected(spec: str, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        make_partition(toy_stream(), spec, clients)


def test_as_many_clients_as_images() -> None:
    partition = make_partition(toy_stream(per_class=2), "dirichlet:0.1", 4)
    assert partition.counts().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]


def test_five_hundred_clients_and_two_classes(caplog) -> None:
    labels = np.repeat(np.arange(2), 1000)
    train = Images(np.zeros((2000, 1, 1, 3), np.uint8), labels)
    test = Images(np.zeros((2, 1, 1, 3), np.uint8), np.arange(2))
    stream = Stream("toy", train, test, np.arange(2000), (0, 1), ("a", "b"), (Task(0, 0, 2, 2, 1),))
    for spec in (
        "dirichlet:0.01",
        "dirichlet:0.01,draw=sample",
        "dirichlet:0.01,scope=dataset,cap=on,min_size=10",
    ):
        counts = make_partition(stream, spec, 500).counts()
        assert counts.sum() == 2000 and counts.min() == 4
    assert "were moved" in caplog.text
    for spec, complaint in (
        ("quantity:3", "more classes than the 2"),
        ("quantity:0", "at least 1"),
        ("shards:2,shards=3000", "cannot be cut"),
    ):
        with pytest.raises(FczooError, match=complaint):
            make_partition(stream, spec, 500)
