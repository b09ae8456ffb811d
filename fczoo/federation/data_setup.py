"""The images of a run, divided into tasks and split over clients, without torch."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.names import join_first_names
from fczoo.core.options import build
from fczoo.core.registry import DATASETS
from fczoo.core.tasks import Task
from fczoo.data.client_stages import (
    stream_with_stages,
    tasks_by_stage,
    to_stages,
    to_tasks,
    uses_stages,
)
from fczoo.data.dataset import Images, rows
from fczoo.data.partition import Partition, make_partition
from fczoo.data.stream import Stream, TaskDivision, make_stream, make_tasks, task_sizes
from fczoo.data.stream_variants import add_label_noise, blurry_tasks, vary_stream
from fczoo.federation.model_record import (
    ModelRecord,
    has_same_data,
    models_of,
    read_model_record,
    settings_with_local_paths,
)
from fczoo.federation.settings import Settings


def open_stream(s: Settings, pixels: bool = True) -> tuple[Stream, Partition]:
    """Load the images, or only their labels, and split them.

    Raises FczooError for missing data and impossible splits.
    """
    return partition_stream(s, whole_stream(s, pixels))


def whole_stream(s: Settings, pixels: bool = True) -> Stream:
    """Load the images, or only labels, divided into tasks.

    A run that starts from a model has the tasks that the model has learned, followed by tasks of
    the classes that it does not know.

    Raises FczooError for missing data.
    """
    return (
        _continued_stream(s, s.start_from, pixels)
        if s.start_from
        else _load_stream(s, s.tasks, pixels)
    )


def tasks_of(s: Settings, classes: int = 0) -> tuple[Task, ...]:
    """Return the tasks of a run, without its images.

    Args:
        s: Settings of the run.
        classes: Number of all its classes; 0: the number that the data set declares.

    Raises:
        FczooError: The classes cannot be divided in this way, or their number is unknown.
    """
    count = DATASETS.get(s.dataset).classes
    if not s.start_from:
        tasks = make_tasks(s.dataset, classes or count, s.tasks)
        return _tasks_to_learn(s, blurry_tasks(tasks) if s.blurry else tasks)
    path, record = _start_model(s.start_from)
    old = len(record.classes)
    if not has_same_data(settings_with_local_paths(path, record), s.dataset, s.data_root):
        count += old
    tasks = _add_tasks(s, record, (classes or count) - old)
    return _tasks_to_learn(s, tasks, len(record.tasks))


def _tasks_to_learn(s: Settings, tasks: tuple[Task, ...], learned: int = 0) -> tuple[Task, ...]:
    """Return the first tasks of a stream, up to the one after which a run stops.

    Raises FczooError unless that is a task of the stream that the run has not learned.
    """
    stop = s.stop_after_tasks
    if stop is not None and not learned < stop <= len(tasks):
        raise FczooError(
            f"--stop-after-tasks is {stop}, but the tasks of this run are {learned + 1} to "
            f"{len(tasks)}; give one of them, or leave it out"
        )
    return tasks[:stop]


def _load_stream(s: Settings, tasks: TaskDivision, pixels: bool) -> Stream:
    """Load the data set of a run and divide it into tasks."""
    limits = s.train_per_class, s.test_per_class, s.stored_size
    order = s.class_order_seed, *limits, s.class_order
    stream = make_stream(s.dataset, s.root, tasks, *order, pixels, s.resize)
    return vary_stream(stream, vars(s), s.partition_seed)


def _start_model(folder: str) -> tuple[Path, ModelRecord]:
    """Return the folder and the description of one model in it; all have the same tasks."""
    path = models_of(folder)[0]
    return path, read_model_record(path)


def _continued_stream(s: Settings, folder: str, pixels: bool) -> Stream:
    """Load the images of the tasks that a model has learned, and of new classes.

    On the same data, the classes of the model come first. Other data may have only new classes.
    """
    path, record = _start_model(folder)
    values, count = settings_with_local_paths(path, record), len(record.classes)
    new = _load_stream(s, 1, pixels)
    if has_same_data(values, s.dataset, s.data_root):
        stream = _reorder_classes(new, record.classes, path)
    else:
        names = {field.name for field in fields(Settings)} & values.keys()
        settings = build(Settings, "settings", {name: values[name] for name in names})
        try:
            old = whole_stream(settings, pixels)
        except FczooError as error:
            problem = f"--start-from also needs the test images of the model in {path}"
            raise FczooError(f"{problem}: {error}") from error
        stream = _join_streams(_first_classes(old, count), new, path)
    if stream.classes[:count] != tuple(record.classes):
        problem = f"the data of the model in {path} no longer have the classes of its run"
        raise FczooError(f"{problem}; restore them")
    tasks = _add_tasks(s, record, len(stream.classes) - count)
    stream = replace(stream, tasks=tasks, learned_count=len(record.tasks))
    counts = [len(stream.positions(stream.test, task)) for task in tasks[: stream.learned_count]]
    if counts != record.test_counts:
        raise FczooError(
            f"the tasks of the model in {path} now have {counts} test images, not "
            f"{record.test_counts}; restore their data, put new images into another folder, and "
            "leave out --test-per-class"
        )
    return stream


def _add_tasks(s: Settings, record: ModelRecord, new: int) -> tuple[Task, ...]:
    """Return the tasks of a model, followed by those of some new classes."""
    if new < 1:
        raise FczooError(
            f"the model has already learned all {len(record.classes)} classes of {s.dataset}; give "
            "data with further classes by --dataset or --data-root"
        )
    old = [task["stop"] - task["start"] for task in record.tasks]
    assert not isinstance(s.tasks, str)  # see ``check_start_settings``
    sizes = [*old, *task_sizes(f"the new part of {s.dataset}", new, s.tasks)]
    return make_tasks(s.dataset, sum(sizes), sizes)


def _reorder_classes(stream: Stream, names: Sequence[str], path: Path) -> Stream:
    """Return a stream with some classes first, in the order of their names."""
    if stream.classes[: len(names)] == tuple(names):
        return stream
    if missing := sorted({*names} - {*stream.classes}):
        problem = f"the data of the model in {path} no longer have class {missing[0]}"
        raise FczooError(f"{problem}; restore them")
    order = [stream.classes.index(name) for name in names]
    order += [number for number in range(len(stream.classes)) if number not in order]
    arrival = np.argsort(order)
    train, test = (
        images._replace(labels=arrival[images.labels]) for images in (stream.train, stream.test)
    )
    return replace(
        stream,
        train=train,
        test=test,
        class_order=tuple(stream.class_order[number] for number in order),
        classes=tuple(stream.classes[number] for number in order),
    )


def _first_classes(stream: Stream, count: int) -> Stream:
    """Return a stream without the images of all but its first classes."""

    def known_positions(images: Images) -> np.ndarray:
        return np.flatnonzero(images.labels < count)

    if count == len(stream.classes):
        return stream
    parts = {
        name: Images(images.pixels[index] if len(images.pixels) else images.pixels, labels[index])
        for name, images in (("train", stream.train), ("test", stream.test))
        for index, labels in [(known_positions(images), images.labels)]
    }
    train = known_positions(stream.train)
    index, groups = stream.train_index[train], rows(stream.groups, train)
    changes: dict[str, Any] = {**parts, "train_index": index, "groups": groups}
    names = {name: getattr(stream, name)[:count] for name in ("class_order", "classes")}
    return replace(stream, **changes, **names)


def _join_streams(old: Stream, new: Stream, path: Path) -> Stream:
    """Return a stream of the classes of two data sets; positions and labels follow one another."""
    if names := [name for name in new.classes if name in old.classes]:
        raise FczooError(
            f"the model in {path} has already learned {join_first_names(names, 4)}; further tasks "
            "need new classes: leave these out; if a class is a different one with the same name, "
            "rename it"
        )

    def join(first: Images, second: Images) -> Images:
        sides = first.pixels.shape[1:], second.pixels.shape[1:]
        if sides[0] != sides[1]:
            raise FczooError(
                f"images of {new.name} have a side of {sides[1][0]} pixels, those of the model in "
                f"{path} {sides[0][0]}; give --stored-size {sides[0][0]} if they are image files"
            )
        pixels = np.concatenate([first.pixels, second.pixels])
        return Images(pixels, np.concatenate([first.labels, second.labels + len(old.classes)]))

    offset, label = int(old.train_index.max()) + 1, max(old.class_order) + 1
    groups = None
    if old.groups is not None and new.groups is not None:  # no group is in both data sets
        groups = np.concatenate([old.groups, new.groups + old.groups.max() + 1])
    return Stream(
        f"{old.name}+{new.name}",
        join(old.train, new.train),
        join(old.test, new.test),
        np.concatenate([old.train_index, new.train_index + offset]),
        (*old.class_order, *(number + label for number in new.class_order)),
        (*old.classes, *new.classes),
        (),
        old.split if old.split == new.split else f"{old.split}; {new.split}",
        (*old.remarks, *new.remarks),
        groups=groups,
    )


def partition_stream(s: Settings, stream: Stream) -> tuple[Stream, Partition]:
    """Return the stream of tasks as clients see it, and the partition of the training images.

    If clients are in different tasks at the same time, stages replace tasks. Raises FczooError if
    the split is impossible.
    """
    split = partial(
        make_partition,
        stream,
        s.partition,
        s.clients,
        s.partition_seed,
        s.joining,
        s.transition,
        s.partitioner,
    )
    if not uses_stages(s.moving, s.task_order):
        partition = split()
        stream = add_label_noise(stream, partition)
        tasks_of_run = _tasks_to_learn(s, stream.tasks, stream.learned_count)
        return replace(stream, tasks=tasks_of_run), partition
    if s.joining:
        problem = "--moving and --task-order need all clients from the start"
        raise FczooError(f"{problem}; leave out --joining")
    if s.moving is not None and s.moving >= s.clients:
        problem = f"--moving {s.moving} must be below the number of clients, {s.clients}"
        raise FczooError(f"{problem}; lower it, or leave it out to move all clients together")
    order_seed = s.partition_seed if s.task_order == "own" else None
    stage_tasks = tasks_by_stage(s.clients, len(stream.tasks), s.moving or s.clients, order_seed)

    def restore(saved: Partition) -> Partition:
        return to_tasks(saved, stage_tasks)

    tasks = split(restore=restore)
    partition = to_stages(tasks, stage_tasks)
    labels = add_label_noise(stream, tasks).train.labels
    stream = stream_with_stages(stream, partition, stage_tasks)
    return replace(stream, train=stream.train._replace(labels=labels)), partition
