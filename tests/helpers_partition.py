"""Tools of the tests of partitioners: random labels, their split, a small stream."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fczoo import Task
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream

some = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
seeds = st.integers(0, 2**31)

# Up to 5 classes of 1 to 40 images, and clients enough to cover them with one class each.
labels_of = st.lists(st.integers(1, 40), min_size=2, max_size=5).map(
    lambda sizes: np.repeat(np.arange(len(sizes)), sizes)
)


def split(spec: str, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    """Split the positions of labels among clients.

    Args:
        spec: The partitioner with its options.
        labels: Labels [n].
        clients: Number of clients.
        seed: Seed of the split.

    Returns:
        Positions per client.
    """
    return PARTITIONERS.create(spec)(labels, clients, numpy_stream("test", seed))


def table(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Count images per client and class."""
    return np.array([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


def toy_stream(
    name: str = "toy",
    order: tuple[int, ...] = (2, 0, 3, 1),
    tasks: int = 2,
    per_class: int = 12,
    train_index: np.ndarray | None = None,
):
    """Make a stream of 4 classes in tasks of equal size.

    Labels are in order of arrival. Without ``train_index`` the positions are odd numbers, so that
    they differ from places.

    Args:
        name: Name of the data set.
        order: Order in which the classes arrive.
        tasks: Number of tasks.
        per_class: Images per class.
        train_index: Positions of the training images in the data set [n].
    """
    labels = np.tile(np.arange(4), per_class)
    pixels = np.zeros((len(labels), 1, 1, 3), np.uint8)
    index = 2 * np.arange(len(labels)) + 1 if train_index is None else train_index
    size = 4 // tasks
    cut = tuple(Task(t, t * size, (t + 1) * size, 4, tasks) for t in range(tasks))
    return Stream(
        name, Images(pixels, labels), Images(pixels, labels), index, order, tuple("abcd"), cut
    )


def equal(a: Partition, b: Partition) -> bool:
    """Check that two partitions have the same description and the same positions."""
    head = (a.dataset, a.spec, a.seed, a.class_order) == (b.dataset, b.spec, b.seed, b.class_order)
    return (
        head
        and len(a.tasks) == len(b.tasks)
        and all(
            np.array_equal(x, y)
            for s, t in zip(a.tasks, b.tasks, strict=True)
            for x, y in zip(s, t, strict=True)
        )
    )
