"""Data sets as uint8 arrays, and the order in which their classes arrive."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import platformdirs

from .core import Task
from .errors import FczooError
from .registry import DATASETS
from .seeds import numpy_stream


class Images(NamedTuple):
    """Decoded square RGB images and their labels."""

    pixels: np.ndarray  # uint8 [N, S, S, 3]
    labels: np.ndarray  # int64 [N]

    def take(self, index: np.ndarray, size: int | None = None) -> "Images":
        """Some of the images, ``index`` ascending. Raises FczooError for a ``size`` other than the one they have."""
        if size not in (None, self.pixels.shape[1]):
            raise FczooError(f"these images come at {self.pixels.shape[1]} pixels; --stored-size is for data sets of image files")
        return self if len(index) == len(self.labels) else Images(self.pixels[index], self.labels[index])


class Split(Protocol):
    """Training or test part of a data set: ``Images`` in memory, or ``ImageFiles`` that are decoded when they are taken."""

    @property
    def labels(self) -> np.ndarray: ...
    def take(self, index: np.ndarray, size: int | None = None) -> Images: ...


_NO_PIXELS = np.empty((0, 0, 0, 3), np.uint8)


class ImageData(NamedTuple):
    """A data set as it was found."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    split: str = "official"  # how the test part was chosen, for the record


class Archive(NamedTuple):
    """A file to download."""

    url: str
    md5: str = ""  # as published; empty where nobody publishes one
    size: int | None = None  # bytes, where known for certain
    into: str = ""  # folder below the data root in which it is unpacked


class Official(NamedTuple):
    """The numbers of the whole data set; None where they differ from class to class."""

    train: int | None
    test: int | None
    train_per_class: int | None = None
    test_per_class: int | None = None


@dataclass(frozen=True)
class Defaults:
    """The schedule that ``bench`` uses on a data set unless told otherwise; data sets name only what differs."""

    backbone: str = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    tasks: int = 10
    clients: int = 10
    partition: str = "dirichlet:0.5"
    rounds: int = 5
    epochs: int = 5
    batch_size: int = 16
    augment: str = "crop"


class Dataset(ABC):
    """One data set: where its files are, how they are read, what ``bench`` does with it by default."""

    name: ClassVar[str] = ""
    about: ClassVar[str]
    classes: ClassVar[int]  # 0 where they are known only when the files are seen
    defaults: ClassVar[Defaults]
    folder: ClassVar[str] = ""  # expected below the data root; empty for data that come with a package
    source: ClassVar[str] = ""  # where a user gets it
    layout: ClassVar[str] = ""  # what lies in the folder
    licence: ClassVar[str] = ""
    official: ClassVar[Official | None] = None
    archives: ClassVar[tuple[Archive, ...]] = ()  # what ``fczoo data fetch`` downloads; empty where that may or can not be

    @abstractmethod
    def load(self, root: Path) -> ImageData:
        """Read the data below ``root``. Raises FczooError saying what is missing or corrupt and how to get it."""

    def locate(self, root: Path) -> Path:
        """The data set's own folder, also when ``root`` is that folder. Raises FczooError when it is not there."""
        place = root if root.name == Path(self.folder).name else root / self.folder
        if not place.is_dir():
            fetch = f"run `fczoo data fetch {self.name}`, " if self.archives else ""
            raise FczooError(f"no folder {self.folder} in {root}; {fetch}unpack {self.source} there or give its place with --data-root")
        return place


@dataclass(frozen=True)
class Stream:
    """A data set cut into tasks. Labels are renumbered in order of arrival; ``*_index`` are the original positions."""

    name: str
    train: Images
    test: Images
    train_index: np.ndarray
    class_order: tuple[int, ...]  # original label of each class, in order of arrival
    classes: tuple[str, ...]  # names in order of arrival
    tasks: tuple[Task, ...]
    split: str = "official"  # how the test part was chosen

    def positions(self, images: Images, task: Task) -> np.ndarray:
        """Where the images of one task are."""
        return np.flatnonzero((images.labels >= task.start) & (images.labels < task.stop))


def home() -> Path:
    """Folder for data, weights and caches: ``FCZOO_HOME`` or the platform's cache folder."""
    return Path(os.environ.get("FCZOO_HOME") or platformdirs.user_cache_dir("fczoo"))


def make_stream(
    dataset: str,
    root: Path | None = None,
    tasks: int | Sequence[int] = 5,
    class_order_seed: int | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    stored_size: int | None = None,
    class_order: Literal["natural"] | Sequence[int] = "natural",
    pixels: bool = True,
) -> Stream:
    """Load a data set and cut its classes into tasks: see ``task_sizes``.

    Classes come in their natural order, shuffled by ``class_order_seed``, or as ``class_order`` lists their original
    labels. ``*_per_class`` keeps the first images of every class. Without ``pixels`` the images are labels only.
    ``stored_size`` is the side in pixels at which images of files are kept; None: the data set's own.
    """
    data: ImageData = DATASETS.get(dataset)().load(root or home() / "data")
    count = len(data.classes)
    arriving = make_tasks(dataset, count, tasks)
    order = _class_order(dataset, count, class_order_seed, class_order)
    arrival = np.empty(count, np.int64)
    arrival[order] = np.arange(count)
    train_index = _first(data.train.labels, train_per_class)
    test_index = _first(data.test.labels, test_per_class)
    train, test = (
        part.take(index, stored_size) if pixels else Images(_NO_PIXELS, part.labels[index])
        for part, index in ((data.train, train_index), (data.test, test_index))
    )
    return Stream(
        dataset,
        Images(train.pixels, arrival[train.labels]),
        Images(test.pixels, arrival[test.labels]),
        train_index,
        tuple(order.tolist()),
        tuple(data.classes[i] for i in order),
        arriving,
        data.split,
    )


def make_tasks(dataset: str, classes: int, tasks: int | Sequence[int]) -> tuple[Task, ...]:
    """The tasks into which so many classes are cut: see ``task_sizes``."""
    sizes = task_sizes(dataset, classes, tasks)
    bounds = np.cumsum([0, *sizes]).tolist()
    return tuple(Task(t, bounds[t], bounds[t + 1], classes, len(sizes)) for t in range(len(sizes)))


def task_sizes(dataset: str, classes: int, tasks: int | Sequence[int]) -> list[int]:
    """Classes of each task: of so many tasks, as equal as they can be with larger ones first, or as listed."""
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            raise FczooError(f"{dataset} has {classes} classes and cannot be cut into {tasks} tasks; choose --tasks between 1 and {classes}")
        return [len(part) for part in np.array_split(np.arange(classes), tasks)]
    if min(tasks, default=0) < 1 or sum(tasks) != classes:
        raise FczooError(
            f"--tasks {','.join(map(str, tasks))} adds up to {sum(tasks)} classes, but {dataset} has {classes}; each task needs one or more"
        )
    return list(tasks)


def _class_order(dataset: str, count: int, seed: int | None, given: Literal["natural"] | Sequence[int]) -> np.ndarray:
    if given == "natural":
        return np.arange(count) if seed is None else numpy_stream("class order", seed).permutation(count)
    if seed is not None:
        raise FczooError("--class-order lists the classes and --class-order-seed shuffles them; give one of the two")
    if sorted(given) != list(range(count)):
        raise FczooError(f"--class-order must name each of the labels 0 to {count - 1} of {dataset} once; it has {len(given)} entries")
    return np.array(given)


def _first(labels: np.ndarray, per_class: int | None) -> np.ndarray:
    if per_class is None:
        return np.arange(len(labels))
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in np.unique(labels)]))
