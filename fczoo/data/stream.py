"""A data set divided into tasks."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Task
from fczoo.data.dataset import Dataset, ImageData, Images, Resize, Split, domains_of, rows
from fczoo.data.verify import describe_shared_images, shared_images

log = logging.getLogger("fczoo")

DOMAINS = "domains"
TaskDivision = int | Sequence[int] | Literal["domains"]
"""How a data set is cut into tasks: into this many, into these numbers of classes, or by its
domains.
"""

NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)


@dataclass(frozen=True)
class Stream:
    """A data set divided into tasks, its labels renumbered in order of arrival.

    ``domains`` of the images is their domain if domains are the tasks, their stage if stages are
    the tasks, and their task if task boundaries are blurry.
    """

    name: str
    train: Images
    test: Images
    train_index: np.ndarray  # positions in the data set's own training part
    class_order: tuple[int, ...]  # original label of each class, in order of arrival
    classes: tuple[str, ...]  # names in order of arrival
    tasks: tuple[Task, ...]
    split: str = "official"  # how the test part was chosen
    remarks: tuple[str, ...] = ()  # warnings on the images
    # number of its first tasks that the model knows from which the run starts
    learned_count: int = 0
    # int64 [N] group (domain, hospital, writer) of each training image, if the data set has groups
    groups: np.ndarray | None = None
    # few shots, long tail and so on, with their seed; see ``stream_variants``
    variants: Mapping[str, Any] = field(default_factory=dict)

    def positions(self, images: Images, task: Task) -> np.ndarray:
        """Return the positions of the images of one task, ascending.

        Args:
            images: Training or test images of the stream.
            task: One of its tasks.
        """
        in_task = (images.labels >= task.start) & (images.labels < task.stop)
        return np.flatnonzero(
            in_task if images.domains is None else in_task & (images.domains == task.index)
        )


def make_stream(
    dataset: str,
    root: Path | None = None,
    tasks: TaskDivision = 5,
    class_order_seed: int | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    stored_size: int | None = None,
    class_order: Literal["natural"] | Sequence[int] = "natural",
    pixels: bool = True,
    resize: Resize = "crop",
) -> Stream:
    """Load a data set and divide its classes into tasks: see ``task_sizes``.

    Remarks on the images, such as files that are not read or test images that are also training
    images, are logged as warnings and stored in ``remarks``.

    Args:
        dataset: Name of the data set.
        root: Data root. Default: ``data`` in ``home()``.
        tasks: Number of tasks, classes of each task, or ``domains``.
        class_order_seed: Seed that shuffles the classes. Default: their natural order.
        train_per_class: First training images that are kept per class (and per domain, where these
            are the tasks; else alternately from all domains). Default: all.
        test_per_class: The same for the test images.
        stored_size: Side in pixels at which images of files are stored. Default: the data set's
            own.
        class_order: Original labels in order of arrival, or ``natural``.
        pixels: Whether to load pixels; if not, images have only labels.
        resize: How files become square.
    """
    reader: Dataset = DATASETS.get(dataset)()
    data: ImageData = reader.load(root or home() / "data")
    count = len(data.classes)
    arriving = make_tasks(dataset, count, tasks)
    order = _class_order(dataset, count, class_order_seed, class_order)
    arrival = np.empty(count, np.int64)
    arrival[order] = np.arange(count)

    def domains(part: Split) -> np.ndarray | None:
        return part.domains if tasks == DOMAINS else None

    def take(part: Split, index: np.ndarray) -> Images:
        image_pixels = (
            with_resize(part, resize).take(index, stored_size).pixels if pixels else NO_PIXELS
        )
        return Images(image_pixels, arrival[part.labels[index]], rows(domains(part), index))

    by_domain = tasks == DOMAINS
    train_index, test_index = (
        _first_images(part.labels, part.domains, by_domain, per_class)
        for part, per_class in ((data.train, train_per_class), (data.test, test_per_class))
    )
    train, test = take(data.train, train_index), take(data.test, test_index)
    overlap_remarks = describe_shared_images(shared_images(train.pixels, test.pixels))
    remarks = tuple(f"{dataset}: {remark}" for remark in (*data.remarks, *overlap_remarks))
    for remark in remarks:
        log.warning(remark)
    return Stream(
        dataset,
        train,
        test,
        train_index,
        tuple(order.tolist()),
        tuple(data.classes[i] for i in order),
        arriving,
        data.split,
        remarks,
        groups=rows(data.train.domains if data.groups is None else data.groups, train_index),
    )


def with_resize(part: Split, resize: Resize) -> Split:
    """Return a part whose image files become square by ``resize``; others are square already.

    Args:
        part: Training or test part of a data set.
        resize: Part of an image that the square shows.
    """
    stored: Any = part
    return replace(stored, resize=resize) if hasattr(part, "resize") else part


def make_tasks(dataset: str, classes: int, tasks: TaskDivision) -> tuple[Task, ...]:
    """Divide classes into tasks (see ``task_sizes``), or create one task per domain.

    A task of a domain has all classes.

    Args:
        dataset: Name of the data set.
        classes: Number of its classes.
        tasks: Number of tasks, classes of each task, or ``domains``.

    Raises:
        FczooError: The data set cannot be divided in this way.
    """
    if isinstance(tasks, str):
        count = len(domains_of(dataset))
        return tuple(Task(t, 0, classes, classes, count) for t in range(count))
    sizes = task_sizes(dataset, classes, tasks)
    bounds = np.cumsum([0, *sizes]).tolist()
    return tuple(Task(t, bounds[t], bounds[t + 1], classes, len(sizes)) for t in range(len(sizes)))


def task_sizes(dataset: str, classes: int, tasks: int | Sequence[int]) -> list[int]:
    """Return the number of classes per task.

    Args:
        dataset: Name of the data set, for messages.
        classes: Number of its classes.
        tasks: Sizes of the tasks, or their number, for sizes as equal as possible, larger ones
            first.

    Raises:
        FczooError: The classes cannot be divided in this way.
    """
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            problem = f"{dataset} has {classes} classes and cannot be cut into {tasks} tasks"
            raise FczooError(f"{problem}; choose --tasks between 1 and {classes}")
        return [len(part) for part in np.array_split(np.arange(classes), tasks)]
    request = f"--tasks {','.join(map(str, tasks))}"
    if min(tasks, default=1) < 1:
        raise FczooError(f"{request} has a task without classes; give at least 1 class per task")
    if sum(tasks) != classes:
        problem = f"{request} adds up to {sum(tasks)} classes, but {dataset} has {classes}"
        raise FczooError(f"{problem}; give numbers with the sum {classes}")
    return list(tasks)


def _class_order(
    dataset: str, count: int, seed: int | None, order: Literal["natural"] | Sequence[int]
) -> np.ndarray:
    """Return the original label of each class, in order of arrival."""
    if order == "natural":
        return (
            np.arange(count)
            if seed is None
            else numpy_stream("class order", seed).permutation(count)
        )
    if seed is not None:
        problem = "--class-order lists the classes and --class-order-seed shuffles them"
        raise FczooError(f"{problem}; give one of the two")
    if sorted(order) != list(range(count)):
        requirement = f"each of the labels 0 to {count - 1} of {dataset} once"
        wrong = [k for k, n in Counter(order).items() if n > 1 or not 0 <= k < count]
        found = f"{len(order)} entries, among them {wrong[0]}" if wrong else f"{len(order)} entries"
        raise FczooError(f"--class-order must name {requirement}; it has {found}")
    return np.array(order)


def _first_images(
    labels: np.ndarray, domains: np.ndarray | None, by_domain: bool, per_class: int | None
) -> np.ndarray:
    """Return positions of the first ``per_class`` images per class and domain; None for all.

    If a class has images of several domains that are not tasks, the domains alternate.
    """
    if per_class is None:
        return np.arange(len(labels))
    if domains is None:
        return np.sort(
            np.concatenate([positions[:per_class] for positions in _group_positions(labels)])
        )
    kinds = _group_positions(domains * (labels.max() + 1) + labels)
    if by_domain:
        return np.sort(np.concatenate([positions[:per_class] for positions in kinds]))
    turn = np.empty(len(labels), np.int64)
    for positions in kinds:
        turn[positions] = np.arange(len(positions))
    first = [
        positions[np.lexsort((domains[positions], turn[positions]))][:per_class]
        for positions in _group_positions(labels)
    ]
    return np.sort(np.concatenate(first))


def _group_positions(kinds: np.ndarray) -> list[np.ndarray]:
    """Return positions of each kind, ascending."""
    order = np.argsort(kinds, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)


BLOCK = 1024  # images that are hashed at once, so that a data set on disk need not fit into memory


def data_sha256(stream: Stream) -> str:
    """Hash the images and labels of both splits, as the run uses them.

    Args:
        stream: Data set divided into tasks.
    """
    digest = hashlib.sha256()
    for images in (stream.train, stream.test):
        digest.update(f"{images.pixels.shape}".encode() + images.labels.tobytes())
        for start in range(0, len(images.labels), BLOCK):
            digest.update(images.pixels[start : start + BLOCK].tobytes())
    return digest.hexdigest()
