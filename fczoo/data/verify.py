"""Compares a local copy of a data set with the official numbers (``fczoo data check``)."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Dataset, Official, Split
from fczoo.data.image_files import ImageFiles, UnreadableImage, prepare

SHOWN = 10  # unreadable files that are named


def verify(name: str, root: Path | None = None) -> tuple[str, list[str]]:
    """Count and read everything; returns a table, and the differences in words, none for a whole copy.

    Raises FczooError for a copy that cannot be loaded at all: missing, of another layout, or with a wrong
    checksum.
    """
    dataset: Dataset = DATASETS.get(name)()
    root = (root or home() / "data").expanduser()
    folder = dataset.locate(root) if dataset.folder or dataset.source else None
    data = dataset.load(root)
    official = dataset.official or Official(None, None)
    broken = [reason for split in (data.train, data.test) for reason in unreadable(split)]
    rows = [("classes", str(len(data.classes)), str(dataset.classes or "-"))]
    differences = []
    if dataset.classes and len(data.classes) != dataset.classes:
        differences.append(f"{len(data.classes)} classes, not {dataset.classes}")
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
        differences.append(f"{len(broken)} unreadable files")
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
    return "\n".join(lines), differences


def unreadable(split: Split) -> list[str]:
    """Every file of a part that cannot be read, with the reason; none where the images are in memory."""
    if not isinstance(split, ImageFiles):
        return []

    def reason(name: str) -> str:
        try:
            prepare(split.root / name, split.size)
        except UnreadableImage as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(reason, split.names)
        bar = tqdm(
            found,
            total=len(split.names),
            desc=f"{split.dataset}: reading",
            unit="image",
            disable=not sys.stderr.isatty(),
            leave=False,
        )
        return [text for text in bar if text]


def _range(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return str(low) if low == high else f"{low} to {high}"
