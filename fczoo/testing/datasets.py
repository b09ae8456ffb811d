"""The check of a data set."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import DATASETS, PARTITIONERS
from fczoo.data.dataset import Dataset, ImageData, Split
from fczoo.data.stream import make_stream
from fczoo.data.views import get_augment
from fczoo.federation.settings import Settings
from fczoo.testing.runs import need, need_documented, need_one_line


def check_dataset(
    dataset: str | type[Dataset], root: Path | None = None, stored_size: int | None = None
) -> None:
    """Raise AssertionError, in one sentence, where a data set breaks a rule.

    Checked of the declarations: the name is registered; a docstring and one line ``about`` describe
    it; the default schedule can be used (partition, augmentation, number of tasks); a data set that
    is in a folder names its source, layout and licence, and a missing one is refused in one line
    with its place and ``--data-root``.

    Checked of a copy: it is found from the data root and from its own folder; class names are as
    many as declared and differ; training and test part hold square uint8 RGB images and int64
    labels, and at least one image of every class each; a second load gives the same; and it can be
    cut into tasks.

    Args:
        dataset: Registered name or its class.
        root: Data root that holds a copy, or a small imitation of one. None: only data that come
            with a package are read.
        stored_size: Side in pixels at which images of files are stored; they are decoded into a
            temporary folder. None: their own size.

    Raises:
        AssertionError: A rule is broken.
    """
    name = dataset if isinstance(dataset, str) else dataset.name
    need(
        name in DATASETS.names(),
        f"{dataset!r} is not a registered data set; put @register_dataset(NAME) above it",
    )
    cls = DATASETS.get(name)
    need(
        isinstance(dataset, str) or cls is dataset,
        f"{name} is the name of another data set; choose another one",
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
        f"{name}.about must be one line for `fczoo list datasets`; give classes, images of each "
        "and their size",
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
            f"{name} does not say its {', '.join(missing)}; `fczoo show {name}` lists them for "
            "users",
        )


def _check_absent(name: str, cls: type[Dataset]) -> None:
    """Check that a missing copy raises an error with the place that was searched and the option."""
    with TemporaryDirectory() as empty:
        for root in (Path(empty), Path(empty) / "missing"):
            try:
                cls().load(root)
            except FczooError as error:
                need_one_line(error, name)
                message = str(error)
            else:
                raise AssertionError(
                    f"{name}.load finds something in an empty folder; begin with self.locate(root)"
                )
            for fragment in (cls.folder, str(root), cls.source, "--data-root"):
                need(
                    fragment in message,
                    f"{name}.load refuses a folder without it, but does not name {fragment}; use "
                    "self.locate",
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
            f"{name}.load({str(load_root)!r}) differs from the first load; sort what is found "
            "and draw with a fixed seed",
        )
    for part, split in (("training", first.train), ("test", first.test)):
        _check_images(f"{name}'s {part} part", split, len(first.classes), stored_size)
    stream = make_stream(name, root, tasks=min(2, len(first.classes)), stored_size=stored_size)
    need(
        stream.classes == first.classes,
        f"{name} loses class names when it is cut into tasks; load must return them all",
    )


def _check_data(name: str, cls: type[Dataset], data: ImageData) -> None:
    need(
        isinstance(data, ImageData),
        f"{name}.load returns a {type(data).__name__}; return an ImageData",
    )
    need(
        not cls.classes or len(data.classes) == cls.classes,
        f"{name}.load names {len(data.classes)} classes, but {name}.classes is {cls.classes}; "
        "make them agree",
    )
    need(
        len(set(data.classes)) == len(data.classes),
        f"{name}.load names a class twice; make the names differ, e.g. by the folder's name",
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
        f"{label} has images of {pixels.shape[1]} pixels where {stored_size} were asked for; pass "
        "the size to take",
    )
    need(
        len(pixels) == len(labels) and np.array_equal(images.labels, labels),
        f"{label} has {len(pixels)} images and {len(labels)} labels, or take reorders them; "
        "keep them together",
    )
    need(np.ptp(pixels) > 0, f"{label} has images of one grey throughout; its files are not read")
