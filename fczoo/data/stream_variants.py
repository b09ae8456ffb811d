"""Variants of a stream: few shots, long-tailed classes, blurry boundaries, noisy labels.

They change the training part; test images and their labels do not change.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Task
from fczoo.data.dataset import rows
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream

VARIANTS = {
    "shots": "{:g} training images per class after the first task",
    "imbalance": "long-tailed classes, imbalance {:g}",
    "blurry": "{:.3g} of each class in other tasks",
    "label_noise": "{:.3g} of each client's labels wrong",
}
"""Settings of variants, and what tables say of them; a value of 0 or None is off."""


def describe_variants(values: Mapping[str, Any]) -> list[str]:
    """Describe the variants that are on, one text each.

    Args:
        values: Values by setting; others than ``VARIANTS`` are ignored.
    """
    return [words.format(values[name]) for name, words in VARIANTS.items() if values.get(name)]


def long_tail_counts(sizes: np.ndarray, imbalance: float) -> np.ndarray:
    """Return the images per class of an exponential profile (Cao et al., NeurIPS 2019).

    Class c of C has int(n * imbalance^(c / (C - 1))) images, where n is the size of the largest
    class; at least one, and at most those that it has.

    Args:
        sizes: Images per class [C], in the natural order of the classes.
        imbalance: Ratio of the smallest to the largest class.

    Returns:
        Images per class [C].
    """
    ranks = np.arange(len(sizes)) / max(len(sizes) - 1, 1)
    profile = (sizes.max() * imbalance**ranks).astype(np.int64)
    counts: np.ndarray = np.minimum(profile.clip(min=1), sizes)
    return counts


def vary_stream(stream: Stream, variants: Mapping[str, Any], seed: int) -> Stream:
    """Return a variant of a stream: fewer training images, or blurry boundaries of its tasks.

    Labels do not change here: ``add_label_noise`` needs the partition.

    Args:
        stream: Data set divided into tasks.
        variants: Values of ``VARIANTS``, by setting.
        seed: Seed of all draws.

    Raises:
        FczooError: A class has too few images, or there is only one task.
    """
    values = {name: variants[name] for name in VARIANTS if variants[name]}
    if not values:
        return stream
    sizes, original = np.bincount(stream.train.labels), np.array(stream.class_order)
    counts = sizes.copy()
    if "imbalance" in values:
        natural = np.argsort(original)  # classes in their natural order
        counts[natural] = long_tail_counts(sizes[natural], values["imbalance"])
    if "shots" in values:
        later = slice(stream.tasks[0].stop, None)
        few = np.flatnonzero(sizes[later] < values["shots"])
        if len(few):
            label = int(few[0]) + stream.tasks[0].stop
            raise FczooError(
                f"class {stream.classes[label]} has {sizes[label]} training images, fewer than "
                f"--shots {values['shots']}; lower it"
            )
        counts[later] = values["shots"]
    order = [  # positions of each class, shuffled; the key is the original label
        numpy_stream("stream", seed, int(label)).permutation(
            np.flatnonzero(stream.train.labels == arrival)
        )
        for arrival, label in enumerate(original)
    ]
    chosen = [positions[:count] for positions, count in zip(order, counts, strict=True)]
    if "blurry" in values:
        stream = _blur(stream, chosen, values["blurry"], seed)
    index = np.sort(np.concatenate(chosen))
    if len(index) < len(stream.train_index):
        pixels, labels, domains = stream.train
        images = pixels[index] if len(pixels) else pixels
        stream = replace(
            stream,
            train=stream.train._replace(
                pixels=images, labels=labels[index], domains=rows(domains, index)
            ),
            train_index=stream.train_index[index],
            groups=rows(stream.groups, index),
        )
    return replace(stream, variants={**values, "seed": seed})


def _blur(stream: Stream, order: list[np.ndarray], part: float, seed: int) -> Stream:
    """Move a part of the training images of each class to the other tasks, in equal shares.

    This gives the blurry tasks of Bang et al. (CVPR 2021). Every task has all classes; the test
    images of a class belong to its original task.

    Args:
        stream: Data set divided into tasks of classes.
        order: Positions of the images of each class in random order.
        part: Share of each class that other tasks get.
        seed: Seed of the draw of the tasks that get one image more than others.

    Raises:
        FczooError: There is one task only.
    """
    count = len(stream.tasks)
    if count == 1:
        raise FczooError("--blurry needs at least two tasks, but this run has one; raise --tasks")
    task_of_class = np.repeat(np.arange(count), [task.size for task in stream.tasks])
    domains = task_of_class[stream.train.labels]
    for label, positions in enumerate(order):
        moved = positions[: round(part * len(positions))]
        others = np.delete(np.arange(count), task_of_class[label])
        rng = numpy_stream("blurry", seed, stream.class_order[label])
        domains[moved] = np.resize(rng.permutation(others), len(moved))
    return replace(
        stream,
        train=stream.train._replace(domains=domains),
        test=stream.test._replace(domains=task_of_class[stream.test.labels]),
        tasks=blurry_tasks(stream.tasks),
    )


def blurry_tasks(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Return the tasks with all classes in each of them.

    Args:
        tasks: Tasks of a stream with sharp boundaries.
    """
    return tuple(replace(task, start=0, stop=task.classes) for task in tasks)


def noisy_count(images: int, rate: float) -> int:
    """Return the number of a client's images of a task that get a wrong label.

    Args:
        images: Number of the client's images of the task.
        rate: Share of wrong labels.
    """
    return round(rate * images)


def add_label_noise(stream: Stream, partition: Partition) -> Stream:
    """Return a stream with symmetric label noise, drawn for each client and task.

    Each wrong label is one of the other classes of the task, all with the same probability.

    Args:
        stream: Stream of tasks whose ``variants`` state the rate of the noise.
        partition: Its partition.

    Raises:
        FczooError: A task has one class, or an image belongs to several clients.
    """
    rate = stream.variants.get("label_noise")
    if not rate:
        return stream
    labels = stream.train.labels.copy()
    for task, clients in zip(stream.tasks, partition.tasks, strict=True):
        if task.size == 1:
            problem = (
                f"--label-noise needs tasks of several classes, but task {task.index + 1} has one"
            )
            raise FczooError(f"{problem}; lower --tasks")
        if len(np.unique(clients.positions)) < len(clients.positions):
            problem = (
                f"--label-noise needs disjoint clients, but those of {partition.spec} share images"
            )
            raise FczooError(f"{problem}; use another --partition")
        for client, images in enumerate(clients.within(stream.train_index)):
            rng = numpy_stream("label noise", partition.seed, task.index, client)
            wrong = rng.permutation(images)[: noisy_count(len(images), rate)]
            shift = rng.integers(1, task.size, len(wrong))
            labels[wrong] = task.start + (labels[wrong] - task.start + shift) % task.size
    return replace(stream, train=stream.train._replace(labels=labels))
