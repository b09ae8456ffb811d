"""Layouts of image folders: class folders, which are divided, or a training and a test part."""

import csv
import hashlib
import itertools
import posixpath
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.options import plural
from fczoo.data.dataset import ImageData
from fczoo.data.folder_scan import (
    TEST,
    TRAIN,
    find_named,
    has_images,
    normalise_name,
    normalise_path,
    raw_name,
    read_list,
    read_listed_images,
    subfolders,
)
from fczoo.data.image_files import (
    ImageFiles,
    describe_unread_files,
    display_names,
    list_images,
    make_part,
    read_train_test_folders,
    scan_classes,
)

GROUPS = "groups.csv"
LAYOUT_HINT = "expected {train,test}/CLASS/* or CLASS/*"
FRACTIONS = {5: "a fifth", 6: "a sixth"}
"""Share of a class -> its name in the description of a split."""


def read_folders(
    dataset: str,
    root: Path,
    size: int,
    classes: tuple[str, ...] | None = None,
    share: int = 5,
) -> ImageData:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``, or ``CLASS/*`` by ``read_single_folder``.

    The parts may have any of the names ``TRAIN`` and ``TEST``; the first test part with the
    training classes is used.

    Args:
        dataset: Name of the data set.
        root: Folder of the parts or of the class folders.
        size: Side in pixels at which images are stored.
        classes: Names of the classes. Default: the names of the folders.
        share: Number of images of a class per test image, without a test part.

    Raises:
        FczooError: Images are directly in a part, or one part is missing.
    """
    parts = find_parts(root)
    if parts is None:
        _refuse_nested_parts(root)
        return read_single_folder(dataset, root, size, classes, share)
    train, test, remarks = parts
    if test is None:
        data = read_single_folder(dataset, train, size, classes, share)
    else:
        data = read_train_test_folders(dataset, train, test, size, classes)
    return data._replace(remarks=(*remarks, *data.remarks))


def find_parts(root: Path) -> tuple[Path, Path | None, tuple[str, ...]] | None:
    """Find the training and the test part.

    A part without folders of the training classes, such as an unlabelled ``test``, is skipped.

    Args:
        root: Folder that may hold the parts.

    Returns:
        The training part, the test part or None, and remarks; None without parts.

    Raises:
        FczooError: Images are directly in a part, or the training part is missing or occurs twice,
            or a list of files is next to it.
    """
    folders = subfolders(root)
    train = [root / name for name in find_named(folders, TRAIN)]
    tests = [root / name for name in find_named(folders, TEST)]
    parts = [*train, *tests]
    flat = [part for part in parts if not subfolders(part) and has_images(part)]
    holds_classes = any(subfolders(part) and not has_images(part) for part in parts)
    if not parts or not (holds_classes or len(parts) == len(folders) or (train and tests)):
        return None  # classes may be called so, too: train, car, bus
    if train and flat and (train[0] in flat or len(flat) == len(tests)):
        folder_names = " and ".join(f"{part.name}/" for part in flat)
        problem = f"images are directly in {folder_names}, in {root}"
        raise FczooError(f"{problem}; expected {flat[0].name}/CLASS/*, one folder per class")
    if len(train) > 1:
        raise FczooError(f"{train[0]} and {train[1]} are both the training part; keep one")
    if not train:
        raise FczooError(f"{root} has {tests[0].name}/ but no train/; {LAYOUT_HINT}")
    if tests:
        return _choose_test_part(train[0], tests)
    for path in find_lists(root, []).values():
        problem = f"the list {path} has no effect beside a folder {train[0].name}/"
        raise FczooError(f"{problem}; move it to {train[0]}, with paths relative to that folder")
    return (
        train[0],
        None,
        (f"no test part next to {train[0].name}/; test images are chosen from {train[0].name}/",),
    )


def _choose_test_part(train: Path, tests: list[Path]) -> tuple[Path, Path, tuple[str, ...]]:
    """Return both parts, and remarks on the parts that are not used."""
    class_names = {normalise_name(name) for name in subfolders(train)}
    matching_parts = [
        part for part in tests if class_names & {normalise_name(name) for name in subfolders(part)}
    ]
    test = (matching_parts or tests)[0]
    remarks = []
    for part in tests:
        if part != test:
            why = "" if part in matching_parts else "has no folders of the training classes and "
            remarks.append(f"{part.name}/ {why}is not used; {test.name}/ is the test part")
    return train, test, tuple(remarks)


def _refuse_nested_parts(root: Path) -> None:
    """Raise FczooError if the parts are one level too deep: in one folder or in each class."""
    folders = subfolders(root)
    inner = {name: subfolders(root / name) for name in folders}
    if len(folders) == 1 and inner[folders[0]] and not has_images(root / folders[0]):
        inner_folder = root / folders[0]
        problem = f"{root} has only the folder {folders[0]}, and no class folders"
        raise FczooError(f"{problem}; give --data-root {inner_folder}")
    if folders and all(
        find_named(names, TRAIN) and find_named(names, TEST) for names in inner.values()
    ):
        problem = f"each class folder in {root} has its own train/ and test/"
        raise FczooError(f"{problem}; {LAYOUT_HINT}")


Key = Callable[[str, str], str]


def read_single_folder(
    dataset: str,
    root: Path,
    size: int,
    classes: tuple[str, ...] | None = None,
    share: int = 5,
) -> ImageData:
    """Return a data set of ``CLASS/*``, divided into a training and a test part.

    ``train.txt`` and ``test.txt`` in the folder list the images of the parts, one path below the
    folder per line. With one list the other part has the remaining images. Without lists the test
    part has one image in ``share`` of each class (``choose_test_images``).

    Args:
        dataset: Name of the data set.
        root: Folder of the class folders.
        size: Side in pixels at which images are stored.
        classes: Names of the classes. Default: the names of the folders.
        share: Number of images of a class per test image; a key of ``FRACTIONS``.

    Raises:
        FczooError: A list does not fit, or a class has no training image left.
    """
    scans = scan_classes(root)
    folders = list_images(root, scans)
    remarks = describe_unread_files(root, scans)
    lists = find_lists(root, remarks)
    if not lists:
        return divide(dataset, root, folders, size, classes, share, remarks=tuple(remarks))
    train, test = _read_lists(lists, set(itertools.chain.from_iterable(folders.values())), remarks)
    split = ", ".join(f"{path.name}, sha256 {_digest(path)}" for path in lists.values())
    return _parts(dataset, root, folders, size, classes, train, test, split, tuple(remarks))


def divide(
    dataset: str,
    root: Path,
    folders: dict[str, list[str]],
    size: int,
    classes: tuple[str, ...] | None = None,
    share: int = 5,
    key: Key | None = None,
    remarks: tuple[str, ...] = (),
) -> ImageData:
    """Return a data set with one image in ``share`` of each class for testing.

    Args:
        dataset: Name of the data set.
        root: Folder of the images.
        folders: Class -> names of its images below ``root``.
        size: Side in pixels at which images are stored.
        classes: Names of the classes. Default: the keys of ``folders``.
        share: Number of images of a class per test image; a key of ``FRACTIONS``.
        key: Function from a class and a name to the text that is hashed. Default: the name.
        remarks: Warnings on this copy of the data set.

    Raises:
        FczooError: No class has two images.
    """
    test = choose_test_images(folders, 0, share, key)
    if not test:
        advice = "give at least two images per class, or train/ and test/ folders"
        raise FczooError(f"{root} is too small to hold out test images; {advice}")
    images = set(itertools.chain.from_iterable(folders.values()))
    split = f"{FRACTIONS[share]} of every class by sha256, seed 0"
    return _parts(dataset, root, folders, size, classes, images - test, test, split, remarks)


def choose_test_images(
    folders: dict[str, list[str]], seed: int, share: int = 5, key: Key | None = None
) -> set[str]:
    """Return one in ``share`` of the images, the same on every machine.

    With ``share`` 5 these are 6,000 of 30,000. Each class gives the images with the lowest sha256
    of ``SEED:NAME``, so neither the order of the files nor a library's random numbers matter. If
    the rounded counts add up to fewer images than the share of all images, the classes with the
    largest remainders give one more. A class with at least two images gives one or more.

    Args:
        folders: Class -> names of its images.
        seed: Seed of the hash.
        share: Number of images of a class per test image.
        key: Function from a class and a name to the text that is hashed. Default: the name.
    """
    sizes = np.array([len(images) for images in folders.values()])
    counts = np.maximum(sizes // share, np.minimum(sizes - 1, 1))
    missing = round(int(sizes.sum()) / share) - int(counts.sum())
    remainder = np.where((counts == sizes // share) & (sizes > 1), sizes % share, 0)
    counts[np.argsort(-remainder, kind="stable")[: max(missing, 0)]] += 1
    counts = np.minimum(counts, sizes - 1)

    def rank(label: str, name: str) -> bytes:
        text = key(label, name) if key else name
        return hashlib.sha256(f"{seed}:".encode() + raw_name(text)).digest()

    chosen: set[str] = set()
    for (label, images), count in zip(folders.items(), counts.tolist(), strict=True):
        chosen.update(sorted(images, key=partial(rank, label))[:count])
    return chosen


def find_lists(root: Path, remarks: list[str]) -> dict[str, Path]:
    """Return the lists of the parts, ``train`` before ``test``.

    Args:
        root: Folder of the lists.
        remarks: List to which a line per skipped list is appended.
    """
    files = {path.stem: path for path in root.iterdir() if path.suffix == ".txt" and path.is_file()}
    lists = {}
    for kind, names in (("train", TRAIN), ("test", TEST)):
        paths = [files[name] for name in find_named(sorted(files), names)]
        if paths:
            lists[kind] = paths[0]
        remarks += [
            f"{path.name} is not used; {paths[0].name} lists the {kind} part" for path in paths[1:]
        ]
    return lists


def _read_lists(
    lists: Mapping[str, Path], images: set[str], remarks: list[str]
) -> tuple[set[str], set[str]]:
    """Return the images of the training and of the test part.

    Raises:
        FczooError: A list does not fit, or an image is in both.
    """
    parts: dict[str, set[str]] = {}
    for kind, path in lists.items():
        parts[kind], repeats = read_listed_images(path, images)
        if repeats:
            remarks.append(f"{path.name} names {plural(repeats, 'image')} more than once")
    train = parts.get("train", images - parts.get("test", set()))
    test = parts.get("test", images - train)
    if overlap := sorted(train & test):
        list_names = " and ".join(str(path) for path in lists.values())
        problem = f"{list_names} both name {overlap[0]} ({len(overlap)} such images)"
        raise FczooError(f"{problem}; list each image in only one of them")
    if "test" not in parts:
        rest = plural(len(test), "image")
        remarks.append(f"test part: the {rest} that {lists['train'].name} does not list")
    elif surplus := len(images - train - test):
        verb = "is" if surplus == 1 else "are"
        names = " and ".join(path.name for path in lists.values())
        remarks.append(f"{plural(surplus, 'image')} {verb} not in {names}: not used")
    return train, test


def _parts(
    dataset: str,
    root: Path,
    folders: dict[str, list[str]],
    size: int,
    classes: tuple[str, ...] | None,
    train: set[str],
    test: set[str],
    split: str,
    remarks: tuple[str, ...],
) -> ImageData:
    """Return the data set of two sets of images.

    Raises:
        FczooError: A class has no training image, or the test part is empty.
    """
    train_folders, test_folders = (
        {name: [image for image in images if image in chosen] for name, images in folders.items()}
        for chosen in (train, test)
    )
    if empty_classes := [name for name, images in train_folders.items() if not images]:
        problem = f"class {display_names(empty_classes)[0]} in {root} has no training image left"
        raise FczooError(f"{problem}; add images, or correct the lists")
    if not test:
        problem = f"the lists in {root} leave no image for testing"
        raise FczooError(f"{problem}; move some images from the training list to the test list")
    return ImageData(
        make_part(dataset, root, train_folders, size),
        make_part(dataset, root, test_folders, size),
        classes or display_names(folders),
        split,
        remarks,
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_groups(root: Path, images: ImageFiles) -> np.ndarray | None:
    """Return the group of each image, such as a hospital or writer.

    They come from ``groups.csv`` in the data root, with the columns ``file`` (below that folder)
    and ``group``, or else from the folders GROUP of ``CLASS/GROUP/FILE``. Groups are numbered in
    the order of their names.

    Args:
        root: Data root.
        images: Training part.

    Returns:
        int64 [N]; None without ``groups.csv`` if an image is not in such a folder.

    Raises:
        FczooError: The list has other columns, or does not name an image, or names it twice.
    """
    path = root / GROUPS
    if path.is_file():
        group_of = _read_group_list(path)
        below = images.root.relative_to(root).as_posix()
        files = [normalise_name(posixpath.normpath(f"{below}/{name}")) for name in images.names]
        if missing := [file for file in files if file not in group_of]:
            problem = f"{path} gives no group to {missing[0]} ({len(missing)} such images)"
            raise FczooError(f"{problem}; add a line FILE,GROUP for each training image")
        names = [group_of[file] for file in files]
    else:
        steps = [name.split("/") for name in images.names]
        if any(len(parts) != len(("CLASS", "GROUP", "FILE")) for parts in steps):
            return None
        names = [group for _, group, _ in steps]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _read_group_list(path: Path) -> dict[str, str]:
    """Return the group of each file that a list names.

    Raises:
        FczooError: The list has other columns, names a file twice, or leaves the folder.
    """
    lines = csv.reader(read_list(path))
    if [cell.strip().lower() for cell in next(lines, [])] != ["file", "group"]:
        raise FczooError(f"the first line of {path} must be file,group, the names of its columns")
    group_of: dict[str, str] = {}
    for cells in lines:
        if len(cells) != 2 or not all(map(str.strip, cells)):
            line = ",".join(cells)[:80]
            raise FczooError(f"line {line!r} of {path} is not FILE,GROUP; correct it")
        file = normalise_path(cells[0], path)
        if file in group_of:
            raise FczooError(f"{path} names {file} twice; leave one line")
        group_of[file] = cells[1].strip()
    return group_of
