"""Test asynchronous clients: the task of each client and its images per stage."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError
from fczoo.core.tasks import Task
from fczoo.data.client_stages import stream_with_stages, tasks_by_stage, to_stages, to_tasks
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition, load_partition, make_partition
from fczoo.data.stream import Stream, make_stream
from fczoo.federation.data_setup import open_stream
from fczoo.federation.settings import Settings
from helpers_partition import seeds, some, toy_stream


def test_stages_match_hand_calculation() -> None:
    """Move five clients through three tasks, two at a time.

    Clients 0 and 1 move, then 2 and 3, 4 and 0, 1 and 2, 3 and 4.
    """
    assert tasks_by_stage(5, 3, 2).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [2, 1, 1, 1, 1],
        [2, 2, 2, 1, 1],
        [2, 2, 2, 2, 2],
    ]


def test_last_stage_moves_remaining_clients() -> None:
    assert tasks_by_stage(3, 2, 2).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert tasks_by_stage(3, 1, 2).tolist() == [[0, 0, 0]]
    assert tasks_by_stage(2, 3, 2).tolist() == [[0, 0], [1, 1], [2, 2]]


runs = st.tuples(st.integers(1, 7), st.integers(1, 6), st.data(), st.none() | seeds)


@some
@given(runs)
def test_every_client_visits_every_task_once(run) -> None:
    clients, tasks, data, seed = run
    moving = data.draw(st.integers(1, clients))
    places = tasks_by_stage(clients, tasks, moving, seed)
    moves = (places[1:] != places[:-1]).sum(1)
    assert (moves[:-1] == moving).all()
    assert (moves[-1:] > 0).all()
    assert moves.sum() == clients * (tasks - 1)
    stays = []
    for k in range(clients):
        met = [t for s, t in enumerate(places[:, k]) if s == 0 or places[s - 1, k] != t]
        assert sorted(met) == list(range(tasks))  # each task once, in consecutive stages
        assert seed is not None or met == sorted(met)
        stays += [np.count_nonzero(places[:, k] == t) for t in met[:-1]]
    assert not stays or min(stays) >= 1
    if seed is None:
        assert (places[-1] == tasks - 1).all() and (places[0] == 0).all()
        assert (np.ptp(places, 1) <= 1).all()  # clients move in turn: at most one task apart
    else:
        assert np.array_equal(places, tasks_by_stage(clients, tasks, moving, seed))


@some
@given(st.sampled_from(["iid", "dirichlet:0.5", "overlap:0.6"]), st.data(), seeds, st.booleans())
def test_client_has_images_in_stages_of_their_task(spec, data, seed, own) -> None:
    stream = toy_stream(tasks=4)
    clients = data.draw(st.integers(1, 5))
    places = tasks_by_stage(clients, 4, data.draw(st.integers(1, clients)), seed if own else None)
    partition = make_partition(stream, spec, clients, seed)
    split = to_stages(partition, places)
    for k in range(clients):
        for t in range(4):
            for position in partition.tasks[t][k]:
                having = [s for s in range(len(places)) if position in split.tasks[s][k]]
                assert having == np.flatnonzero(places[:, k] == t).tolist()
        met, client_positions = (
            np.unique(np.concatenate([t[k] for t in p.tasks])) for p in (split, partition)
        )
        assert np.array_equal(met, client_positions)
    assert to_tasks(split, places).sha256 == partition.sha256
    met = stream_with_stages(stream, split, places)
    assert met.train.domains is not None and met.test.domains is not None
    tests = [met.positions(met.test, task) for task in met.tasks]
    assert sorted(np.concatenate(tests)) == list(
        range(len(stream.test.labels))
    )  # each in one stage
    for position, stage in zip(stream.train_index, met.train.domains, strict=True):
        having = [s for s, parts in enumerate(split.tasks) if position in parts.positions]
        assert stage == min(having, default=len(places) - 1)


def test_test_images_follow_first_stage_of_class() -> None:
    """Assign the test images of a class to the stage in which a client first has it.

    Task 0 has classes 0 and 1, task 1 has 2 and 3. Client 0 continues first; only it has class 3.
    """
    labels = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    images = Images(np.zeros((8, 1, 1, 3), np.uint8), labels)
    cut = (Task(0, 0, 2, 4, 2), Task(1, 2, 4, 4, 2))
    stream = Stream("toy", images, images, np.arange(8), (0, 1, 2, 3), tuple("abcd"), cut)
    first, second = [np.array([0, 2]), np.array([1, 3])], [np.array([6]), np.array([4, 5, 7])]
    places = tasks_by_stage(2, 2, 1)
    assert places.tolist() == [[0, 0], [1, 0], [1, 1]]
    split = to_stages(Partition("toy", "by hand", 0, (0, 1, 2, 3), (first, second)), places)
    assert [[part.tolist() for part in stage] for stage in split.tasks] == [
        [[0, 2], [1, 3]],
        [[6], [1, 3]],
        [[6], [4, 5, 7]],
    ]
    met = stream_with_stages(stream, split, places)
    assert met.tasks == (Task(0, 0, 2, 4, 3), Task(1, 0, 4, 4, 3), Task(2, 0, 4, 4, 3))
    assert [met.positions(met.test, task).tolist() for task in met.tasks] == [
        [0, 1, 2, 3],
        [6, 7],
        [4, 5],
    ]
    assert [met.positions(met.train, task).tolist() for task in met.tasks] == [
        [0, 1, 2, 3],
        [6],
        [4, 5, 7],
    ]


def test_test_images_follow_first_stage_of_domain() -> None:
    labels, domains = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    images = Images(np.zeros((4, 1, 1, 3), np.uint8), labels, domains)
    cut = tuple(Task(t, 0, 2, 2, 2) for t in range(2))
    stream = Stream("toy", images, images, np.arange(4), (0, 1), tuple("ab"), cut)
    parts = ([np.array([0]), np.array([1])], [np.array([2]), np.array([3])])
    places = tasks_by_stage(2, 2, 1)
    met = stream_with_stages(
        stream, to_stages(Partition("toy", "by hand", 0, (0, 1), parts), places), places
    )
    assert [met.positions(met.test, task).tolist() for task in met.tasks] == [[0, 1], [2], [3]]


SETTINGS = Settings(
    clients=4, tasks=3, moving=2, train_per_class=20, test_per_class=5, partition="iid"
)


@pytest.mark.parametrize("order", ["same", "own"])
def test_saved_partition_with_stages_is_restored(order: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, task_order=order)
    stream, split = open_stream(settings, pixels=False)
    split.save(tmp_path / "p.json")
    assert load_partition(tmp_path / "p.json").sha256 == split.sha256
    file_settings = replace(settings, partition=f"file:{tmp_path / 'p.json'}")
    again, same = open_stream(file_settings, pixels=False)
    assert same.sha256 == split.sha256 and again.tasks == stream.tasks
    assert np.array_equal(again.test.domains, stream.test.domains)
    for changes, complaint in (
        ({"moving": 1}, "has 5 tasks or stages of 4 clients, but this run needs 9 tasks"),
        (
            {"task_order": {"same": "own", "own": "same"}[order]},
            "--train-per-class and --task-order",
        ),
        ({"moving": None, "task_order": "same"}, "another number of tasks"),
        ({"train_per_class": 19}, "names images that task"),
    ):
        with pytest.raises(FczooError, match=complaint):
            open_stream(replace(file_settings, **changes), pixels=False)


def test_saved_partition_of_other_stages_is_rejected() -> None:
    """Reject a saved partition whose clients move at other stages.

    Five clients and two tasks: 3 continue and then 2, or 4 and then 1.
    """
    split = to_stages(make_partition(toy_stream(), "iid", 5), tasks_by_stage(5, 2, 3))
    with pytest.raises(FczooError, match="move to their next tasks at other times than here"):
        to_tasks(split, tasks_by_stage(5, 2, 4))


def test_stages_keep_partition_of_plain_run() -> None:
    stream, split = open_stream(SETTINGS, pixels=False)
    plain, partition = open_stream(replace(SETTINGS, moving=None), pixels=False)
    assert to_tasks(split, tasks_by_stage(4, 3, 2)).sha256 == partition.sha256
    assert plain.tasks == make_stream("digits", tasks=3, pixels=False).tasks
    assert [task.stop for task in stream.tasks] == [4, 7, 7, 10, 10]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"moving": 4}, "--moving 4 must be below the number of clients, 4"),
        ({"moving": 9}, "--moving 9 must be below the number of clients, 4"),
        ({"joining": 1}, "leave out --joining"),
        ({"moving": None, "task_order": "own", "joining": 1}, "leave out --joining"),
    ],
)
def test_invalid_stage_settings_are_rejected(changes: dict, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        open_stream(replace(SETTINGS, **changes), pixels=False)


@pytest.mark.parametrize(
    "changes", [{"partition": "dirichlet:0.5,scope=dataset"}, {"transition": 0.5}]
)
def test_stages_keep_partition_with_other_options(changes: dict) -> None:
    """Split tasks as without stages, even if some parts are empty."""
    settings = replace(SETTINGS, **changes)
    _, split = open_stream(settings, pixels=False)
    _, partition = open_stream(replace(settings, moving=None), pixels=False)
    assert to_tasks(split, tasks_by_stage(4, 3, 2)).sha256 == partition.sha256
