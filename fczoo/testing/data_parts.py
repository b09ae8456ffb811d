"""Checks of data sets and partitioners."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np

from fczoo.core.errors import FczooError, silence_warnings
from fczoo.core.registry import DATASETS, PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Partitioner, Task, split_images
from fczoo.data.dataset import Dataset, ImageData, Images, Split
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream, make_stream
from fczoo.data.views import get_augment
from fczoo.federation.settings import Settings
from fczoo.testing.toy_benchmark import (
    Draw,
    check_random_cases,
    need,
    need_documented,
    need_one_line,
)

Refuses = Callable[[int, int, int], bool]
"""``refuses(images, classes, clients)`` returns whether a partitioner cannot split such data."""

TASKS = (Task(0, 0, 5, 10, 2), Task(1, 5, 10, 10, 2))
EASY, CLIENTS = np.repeat(np.arange(5), 40), 8
"""Labels and number of clients that any partitioner can handle."""
GROUPS = CLIENTS
"""Number of groups, such as domains, in these checks; image i has group i modulo GROUPS."""


def check_partitioner(spec: str, refuses: Refuses | None = None, is_random: bool = True) -> None:
    """Check that a partitioner follows all rules; a broken one raises AssertionError.

    The rules, on random labels of one to five classes and one to nine clients:

    - The result is one array of integer positions per client. Positions are inside the labels, and
      no client has one twice.
    - The labels are unchanged, and the same generator gives the same result.
    - Every image is assigned to exactly one client, unless the partitioner has the attribute
      ``disjoint = False``.
    - Different seeds give different results, also for a stream of several tasks.
    - The partitioner and each of its options have a description.

    The images have eight groups, which alternate from image to image.

    Args:
        spec: Registered name with its options, such as ``dirichlet:0.1``.
        refuses: Returns whether a request is impossible: exactly these must raise FczooError with a
            message of one line. None: any request may raise it, except an easy one (200 images of
            five classes for eight clients).
        is_random: False for a spec without random draws; seeds and streams are then not checked.

    Raises:
        AssertionError: A rule is broken.
    """
    partitioner = PARTITIONERS.create(spec)
    need_documented(PARTITIONERS.get(spec.partition(":")[0]), spec)

    def case(draw: Draw) -> None:
        sizes = [draw(1, 40) for _ in range(draw(1, 5))]
        labels = np.random.default_rng(draw(0, 2**31)).permutation(
            np.repeat(np.arange(len(sizes)), sizes)
        )
        _check_case(spec, partitioner, labels, draw, refuses)

    with silence_warnings():
        check_random_cases(case)
        easy = _split(spec, partitioner, EASY, CLIENTS, 0, refuses)
        need(
            easy is not None,
            f"{spec} cannot split {len(EASY)} images of 5 classes among {CLIENTS} clients; add "
            "options to the spec, as in 'dirichlet:0.5'",
        )
        if is_random:
            _check_seeds(spec, partitioner)
            _check_stream(spec)


def _check_case(
    spec: str, partitioner: Partitioner, labels: np.ndarray, draw: Draw, refuses: Refuses | None
) -> None:
    clients, seed, original_labels = draw(1, 9), draw(0, 2**31), labels.copy()
    parts = _split(spec, partitioner, labels, clients, seed, refuses)
    need(
        np.array_equal(labels, original_labels),
        f"{spec} modifies its argument `labels` in place; work on a copy",
    )
    if parts is None:
        return
    need(
        len(parts) == clients,
        f"{spec} returns {len(parts)} parts for {clients} clients; return one per client",
    )
    for part in parts:
        need(
            isinstance(part, np.ndarray)
            and part.ndim == 1
            and np.issubdtype(part.dtype, np.integer),
            f"{spec} returns a part that is not a 1-D integer array; return positions in labels",
        )
        need(
            ((part >= 0) & (part < len(labels))).all(),
            f"{spec} returns positions outside labels, which has {len(labels)} entries",
        )
        need(
            len(np.unique(part)) == len(part),
            f"{spec} assigns the same image to a client twice; return each position once",
        )
    if getattr(partitioner, "disjoint", True):
        all_positions = np.sort(np.concatenate(parts))
        need(
            np.array_equal(all_positions, np.arange(len(labels))),
            f"{spec} assigns {len(np.unique(all_positions))} of {len(labels)} images, in "
            f"{len(all_positions)} assignments; assign each image to exactly one client, or set "
            "the attribute disjoint = False",
        )
    second_parts = _parts(partitioner, labels, clients, seed)
    need(
        all(np.array_equal(a, b) for a, b in zip(parts, second_parts, strict=True)),
        f"{spec} returns different parts for the same rng; draw only from rng and keep no state",
    )


def _check_seeds(spec: str, partitioner: Partitioner) -> None:
    seeds, different = range(5), set()
    for seed in seeds:
        different.add(
            tuple(tuple(np.sort(part)) for part in _parts(partitioner, EASY, CLIENTS, seed))
        )
    need(
        len(different) == len(seeds),
        f"{spec} returns the same parts for different seeds; draw from rng",
    )


def _parts(
    partitioner: Partitioner, labels: np.ndarray, clients: int, seed: int
) -> list[np.ndarray]:
    groups = np.arange(len(labels)) % GROUPS
    return split_images(partitioner, labels, clients, numpy_stream("check", seed), groups)


def _split(
    spec: str,
    partitioner: Partitioner,
    labels: np.ndarray,
    clients: int,
    seed: int,
    refuses: Refuses | None,
) -> list[np.ndarray] | None:
    """Return the parts; None if the partitioner refuses a request that it may refuse."""
    request = (len(labels), len(np.unique(labels)), clients)
    description = f"{request[0]} images of {request[1]} classes for {clients} clients"
    try:
        parts = _parts(partitioner, labels, clients, seed)
    except FczooError as error:
        need_one_line(error, spec)
        need(
            refuses is None or refuses(*request),
            f"{spec} refuses {description}, which it should split: {error}",
        )
        return None
    need(
        refuses is None or not refuses(*request),
        f"{spec} splits {description}, which it should refuse; raise FczooError",
    )
    return parts


def _easy_stream() -> Stream:
    """Create a stream of two tasks with labels as in ``EASY``, in random order.

    Positions in the original data differ from positions in the stream.
    """
    labels = np.random.default_rng(0).permutation(np.concatenate([EASY, EASY + 5]))
    images, order = Images(np.empty((0, 0, 0, 3), np.uint8), labels), tuple(range(10))
    return Stream(
        "easy",
        images,
        images,
        3 + 2 * np.arange(len(labels)),
        order,
        tuple("abcdefghij"),
        TASKS,
        groups=np.arange(len(labels)) % GROUPS,
    )


def _check_stream(spec: str) -> None:
    stream = _easy_stream()
    first, same_seed, other_seed = (
        make_partition(stream, spec, CLIENTS, seed) for seed in (4, 4, 5)
    )
    need(
        first.sha256 == same_seed.sha256,
        f"{spec} splits a stream differently with the same seed; draw only from rng",
    )
    need(
        first.sha256 != other_seed.sha256,
        f"{spec} splits a stream in the same way for different seeds; draw from rng",
    )
    for task, parts in zip(stream.tasks, first.tasks, strict=True):
        task_indices = stream.train_index[stream.positions(stream.train, task)]
        need(
            np.isin(np.concatenate(parts), task_indices).all(),
            f"{spec} assigns images of another task; return positions in the argument `labels`",
        )


def check_dataset(
    dataset: str | type[Dataset], root: Path | None = None, stored_size: int | None = None
) -> None:
    """Check that a data set follows all rules; a broken one raises AssertionError.

    Rules of the declaration: the name is registered; a docstring and the line ``about`` describe
    the data set; the default schedule is valid (partition, augmentation, number of tasks). A data
    set in a folder declares source, layout and licence. If it is missing, the error is one line
    with the searched path and ``--data-root``.

    Rules of a copy: the data root and the data set's own folder both work as root; class names are
    distinct, and as many as declared; training and test part have square uint8 RGB images and int64
    labels, with at least one image of every class; a second load gives the same; and it can be
    split into tasks.

    Args:
        dataset: Registered name or class.
        root: Data root with a copy, or a small imitation of one. None: a copy is checked only for
            data that come with a package.
        stored_size: Side in pixels at which image files are stored; they are decoded into a
            temporary folder. None: their original size.

    Raises:
        AssertionError: A rule is broken.
    """
    name = dataset if isinstance(dataset, str) else dataset.name
    need(
        name in DATASETS,
        f"{dataset!r} is not a registered data set; put @register_dataset(NAME) above it",
    )
    cls = DATASETS.get(name)
    need(
        isinstance(dataset, str) or cls is dataset,
        f"{name} is the name of another data set; choose a different name",
    )
    need(
        issubclass(cls, Dataset),
        f"{name} is not a Dataset; derive it from fczoo.data.dataset.Dataset",
    )
    _check_declared(name, cls)
    if cls.folder:
        _check_absent(name, cls)
    if root is not None or not (cls.folder or cls.source):
        with TemporaryDirectory() as home, mock.patch.dict(os.environ, FCZOO_HOME=home):
            _check_copy(name, cls, root or Path(), stored_size)


def _check_declared(name: str, cls: type[Dataset]) -> None:
    need_documented(cls, name)
    need(
        getattr(cls, "about", "") and "\n" not in cls.about,
        f"{name}.about must be one line for `fczoo list datasets`: number of classes, images per "
        "class and image size",
    )
    defaults = cls.defaults
    try:
        Settings.for_dataset(name)
        PARTITIONERS.create(defaults.partition)
        get_augment(defaults.augment)
    except FczooError as error:
        raise AssertionError(f"{name}.defaults cannot be used: {error}") from error
    need(
        1 <= defaults.tasks <= (cls.classes or defaults.tasks),
        f"{name}.defaults has {defaults.tasks} tasks for {cls.classes} classes; choose 1 to "
        f"{cls.classes}",
    )
    for field in ("clients", "rounds", "epochs", "batch_size"):
        value = getattr(defaults, field)
        need(value >= 1, f"{name}.defaults.{field} is {value}; it must be at least 1")
    if cls.folder:
        missing = [field for field in ("source", "layout", "licence") if not getattr(cls, field)]
        need(
            not missing,
            f"{name} does not declare {', '.join(missing)}; set these class attributes, which "
            f"`fczoo show {name}` prints",
        )


def _check_absent(name: str, cls: type[Dataset]) -> None:
    """Check that a missing copy raises an error with the searched path and the option."""
    with TemporaryDirectory() as empty:
        for root in (Path(empty), Path(empty) / "missing"):
            try:
                cls().load(root)
            except FczooError as error:
                need_one_line(error, name)
                message = str(error)
            else:
                raise AssertionError(
                    f"{name}.load returns data for an empty folder; start with self.locate(root)"
                )
            for fragment in (cls.folder, str(root), cls.source, "--data-root"):
                need(
                    fragment in message,
                    f"the error of {name}.load for a missing copy does not contain {fragment}; "
                    "call self.locate(root)",
                )


def _check_copy(name: str, cls: type[Dataset], root: Path, stored_size: int | None) -> None:
    first = cls().load(root)
    _check_data(name, cls, first)
    for load_root in (root, root / cls.folder):
        second = cls().load(load_root)
        need(
            second.classes == first.classes
            and np.array_equal(second.train.labels, first.train.labels)
            and np.array_equal(second.test.labels, first.test.labels)
            and second.split == first.split,
            f"{name}.load({str(load_root)!r}) differs from the first load; sort the files and "
            "draw with a fixed seed",
        )
    for part, split in (("training", first.train), ("test", first.test)):
        _check_images(f"{name}'s {part} part", split, len(first.classes), stored_size)
    stream = make_stream(name, root, tasks=min(2, len(first.classes)), stored_size=stored_size)
    need(
        stream.classes == first.classes,
        f"{name} loses class names when it is split into tasks; load must return them all",
    )


def _check_data(name: str, cls: type[Dataset], data: ImageData) -> None:
    need(
        isinstance(data, ImageData),
        f"{name}.load returns a {type(data).__name__}; return an ImageData",
    )
    need(
        not cls.classes or len(data.classes) == cls.classes,
        f"{name}.load returns {len(data.classes)} class names, but {name}.classes is "
        f"{cls.classes}; make them equal",
    )
    need(
        len(set(data.classes)) == len(data.classes),
        f"{name}.load returns a class name twice; make the class names unique",
    )
    groups, images = data.groups, len(data.train.labels)
    need(
        groups is None or (groups.dtype == np.int64 and groups.shape == (images,)),
        f"{name}.load returns groups that are not int64 [{images}], one per training image",
    )
    need(data.split, f"{name}.load does not say how the test part was chosen; set ImageData.split")


def _check_images(label: str, split: Split, classes: int, stored_size: int | None) -> None:
    labels = split.labels
    need(
        labels.dtype == np.int64 and labels.ndim == 1,
        f"{label} has labels of {labels.dtype}; make them int64 [N]",
    )
    need(
        np.array_equal(np.unique(labels), np.arange(classes)),
        f"{label} must have an image of each of the labels 0 to {classes - 1} and of no other "
        "label",
    )
    images = split.take(np.arange(len(labels)), stored_size)
    pixels = images.pixels
    need(
        pixels.dtype == np.uint8
        and pixels.ndim == 4
        and pixels.shape[3] == 3
        and pixels.shape[1] == pixels.shape[2],
        f"{label} has pixels {pixels.dtype} {list(pixels.shape)}; make them uint8 [N, side, side, "
        "3]",
    )
    need(
        stored_size is None or pixels.shape[1] == stored_size,
        f"{label} has images of side {pixels.shape[1]} instead of {stored_size}; resize them in "
        "`take`, to its argument `size`",
    )
    need(
        len(pixels) == len(labels) and np.array_equal(images.labels, labels),
        f"{label} has {len(labels)} labels, but take returns {len(pixels)} images or other labels; "
        "keep images and labels in the same order",
    )
    need(np.ptp(pixels) > 0, f"{label} has only equal pixels; check that load reads the files")
