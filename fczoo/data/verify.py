"""Compares a local copy of a data set with the official numbers (``fczoo data check``)."""

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
from fczoo.core.streams import is_terminal
from fczoo.data.dataset import Dataset, ImageData, Official, Split
from fczoo.data.duplicates import pixels_digest, say_shared
from fczoo.data.image_files import ImageFiles, UnreadableImage, prepare

SHOWN = 10  # unreadable files that are named


def verify(name: str, root: Path | None = None) -> tuple[str, list[str]]:
    """Count and read everything; returns a table, and the differences in words, none for a whole copy.

    Raises FczooError for a copy that cannot be loaded at all: missing, of another layout, or with a wrong
    checksum.
    """
    dataset: Dataset = DATASETS.get(name)()
    name, root = dataset.name, (root or home() / "data").expanduser()
    folder = dataset.locate(root) if dataset.folder or dataset.source else None
    data = dataset.load(root)
    official = dataset.official or Official(None, None)
    parts = [read_images(split) for split in (data.train, data.test)]
    broken = [read for part in parts for read in part if isinstance(read, str)]
    rows = [("classes", str(len(data.classes)), str(dataset.classes or "-"))]
    differences = []
    if dataset.classes and len(data.classes) != dataset.classes:
        differences.append(f"{plural(len(data.classes), 'class', 'classes')}, not {dataset.classes}")
    for label, split, total, each in (
        ("training images", data.train, official.train, official.train_per_class),
        ("test images", data.test, official.test, official.test_per_class),
    ):
        counts = np.bincount(split.labels, minlength=len(data.classes))
        rows.append((label, str(len(split.labels)), str(total or "-")))
        rows.append(("  a class", _range(counts), str(each or "-")))
        if total and total != len(split.labels):
            differences.append(f"{len(split.labels)} {label}, not {total}")
        elif each and (counts != each).any():
            differences.append(f"{_range(counts)} {label} a class, not {each}")
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
    lines = [f"{name}: {folder or 'comes with its package'}", table, *broken[:SHOWN]]
    if len(broken) > SHOWN:
        lines.append(f"... and {len(broken) - SHOWN} more")
    learned = set(parts[0])
    shared = sum(isinstance(read, bytes) and read in learned for read in parts[1])
    lines += [*data.remarks, *say_shared(shared), *_in_two_classes(data, parts)]
    return "\n".join(lines), differences


def read_images(split: Split) -> list[bytes | str]:
    """Return a hash of the pixels of each image of a part, or why it cannot be read."""
    if not isinstance(split, ImageFiles):
        return [pixels_digest(image) for image in split.take(np.arange(len(split.labels))).pixels]

    def read(name: str) -> bytes | str:
        try:
            return pixels_digest(prepare(split.root / name, split.size))
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


def _in_two_classes(data: ImageData, parts: list[list[bytes | str]]) -> list[str]:
    """Return one line on images whose pixels occur in several classes; else an empty list."""
    labels = np.concatenate([data.train.labels, data.test.labels]).tolist()
    classes: dict[bytes, set[int]] = {}
    for read, label in zip(itertools.chain(*parts), labels, strict=True):
        if isinstance(read, bytes):
            classes.setdefault(read, set()).add(label)
    several = [sorted(own) for own in classes.values() if len(own) > 1]
    if not several:
        return []
    first, second = (data.classes[label] for label in several[0][:2])
    count = "1 image is" if len(several) == 1 else f"{len(several)} images are"
    return [f"{count} in more than one class, such as {first} and {second}"]


def _range(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return str(low) if low == high else f"{low} to {high}"
