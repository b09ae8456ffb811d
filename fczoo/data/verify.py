"""Comparison of a local copy of a data set with official numbers (``fczoo data check``)."""

import hashlib
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from fczoo.core.files import home
from fczoo.core.options import plural
from fczoo.core.registry import DATASETS
from fczoo.core.terminal import is_terminal
from fczoo.data.dataset import IN_PACKAGE, Dataset, ImageData, Official, Split
from fczoo.data.image_files import ImageFiles, UnreadableImage, prepare


def shared_images(train: np.ndarray, test: np.ndarray) -> int:
    """Return the number of ``test`` images with the pixels of a ``train`` image.

    The middle rows of all images are compared first; whole images are read only if their middle row
    occurs in both parts.

    Args:
        train: uint8 [N, S, S, 3]; may be memory-mapped.
        test: uint8 [M, S, S, 3]; may be memory-mapped.
    """
    rows = [_middle_rows(pixels) for pixels in (train, test)]
    common = set(rows[0]) & set(rows[1])
    if not common:
        return 0
    first, second = (
        [pixels_digest(part[i]) for i, row in enumerate(part_rows) if row in common]
        for part, part_rows in ((train, rows[0]), (test, rows[1]))
    )
    train_digests = set(first)
    return sum(digest in train_digests for digest in second)


def describe_shared_images(count: int) -> list[str]:
    """Return one line with the number of shared images; an empty list for zero.

    Args:
        count: Number of test images that are also training images.
    """
    if count == 1:
        return ["1 test image is also a training image"]
    return [f"{count} test images are also training images"] if count else []


def pixels_digest(pixels: np.ndarray) -> bytes:
    """Return the SHA-256 of one image.

    Args:
        pixels: uint8 [S, S, 3].
    """
    return hashlib.sha256(np.ascontiguousarray(pixels).data).digest()


def _middle_rows(pixels: np.ndarray) -> list[bytes]:
    return [image[len(image) // 2].tobytes() for image in pixels]


MAX_LISTED_FILES = 10  # unreadable files that are named


def verify(name: str, root: Path | None = None) -> tuple[str, list[str]]:
    """Count and read all images of a local copy.

    Args:
        name: Name of the data set.
        root: Data root. Default: ``data`` in ``home()``.

    Returns:
        A table, and one text per difference; none for a complete copy.

    Raises:
        FczooError: The copy cannot be loaded at all: it is missing, of another layout, or has a
            wrong checksum.
    """
    dataset: Dataset = DATASETS.get(name)()
    name, root = dataset.name, (root or home() / "data").expanduser()
    data = dataset.load(root)
    folder = dataset.locate(root) if dataset.folder or dataset.source else None
    official = dataset.official or Official(None, None)
    parts = [read_images(split) for split in (data.train, data.test)]
    broken = [read for part in parts for read in part if isinstance(read, str)]
    rows = [("classes", str(len(data.classes)), str(dataset.classes or "-"))]
    differences = []
    if dataset.classes and len(data.classes) != dataset.classes:
        differences.append(
            f"{plural(len(data.classes), 'class', 'classes')}, not {dataset.classes}"
        )
    for label, split, total, each in (
        ("training images", data.train, official.train, official.train_per_class),
        ("test images", data.test, official.test, official.test_per_class),
    ):
        counts = np.bincount(split.labels, minlength=len(data.classes))
        rows.append((label, str(len(split.labels)), str(total or "-")))
        rows.append(("  per class", _format_range(counts), str(each or "-")))
        if total and total != len(split.labels):
            differences.append(f"{len(split.labels)} {label}, not {total}")
        elif each and (counts != each).any():
            differences.append(f"{_format_range(counts)} {label} per class, not {each}")
    rows.append(("unreadable files", str(len(broken)), "0"))
    if broken:
        differences.append(plural(len(broken), "unreadable file"))
    table = tabulate(
        rows,
        ["", "found", "official"],
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", "right", "right"),
    )
    lines = [f"{name}: {folder or IN_PACKAGE}", table, *broken[:MAX_LISTED_FILES]]
    if len(broken) > MAX_LISTED_FILES:
        lines.append(f"... and {len(broken) - MAX_LISTED_FILES} more")
    train_digests = set(parts[0])
    shared_count = sum(isinstance(read, bytes) and read in train_digests for read in parts[1])
    lines += [
        *data.remarks,
        *describe_shared_images(shared_count),
        *_describe_ambiguous_images(data, parts),
    ]
    return "\n".join(lines), differences


def read_images(split: Split) -> list[bytes | str]:
    """Return a hash of the pixels of each image of a part, or why it cannot be read.

    Args:
        split: Part of a data set.
    """
    if not isinstance(split, ImageFiles):
        return [pixels_digest(image) for image in split.take(np.arange(len(split.labels))).pixels]

    def read(name: str) -> bytes | str:
        try:
            return pixels_digest(prepare(split.root / name, split.size, split.upright))
        except UnreadableImage as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        bar = tqdm(
            pool.map(read, split.names),
            total=len(split.names),
            desc=f"{split.dataset}: reading",
            unit="image",
            disable=not is_terminal(sys.stderr),
            leave=False,
        )
        return list(bar)


def _describe_ambiguous_images(data: ImageData, parts: list[list[bytes | str]]) -> list[str]:
    """Return one line on images whose pixels occur in several classes; else an empty list."""
    labels = np.concatenate([data.train.labels, data.test.labels]).tolist()
    classes: dict[bytes, set[int]] = {}
    for read, label in zip(itertools.chain(*parts), labels, strict=True):
        if isinstance(read, bytes):
            classes.setdefault(read, set()).add(label)
    label_lists = [
        sorted(class_labels) for class_labels in classes.values() if len(class_labels) > 1
    ]
    if not label_lists:
        return []
    first, second = (data.classes[label] for label in label_lists[0][:2])
    count = "1 image is" if len(label_lists) == 1 else f"{len(label_lists)} images are"
    return [f"{count} in more than one class, such as {first} and {second}"]


def _format_range(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return str(low) if low == high else f"{low} to {high}"
