"""Tables of Hugging Face's library ``datasets`` as data sets: columns, splits and images.

An image stays encoded in its table until it is taken.
"""

import io
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import nearest, plural
from fczoo.data.dataset import ImageData, Images, Resize, rows
from fczoo.data.folder_layout import FRACTIONS, choose_test_images
from fczoo.data.folder_scan import FORMATS, TEST, TRAIN, find_named
from fczoo.data.hub_files import open_tables
from fczoo.data.image_cache import cached_pixels, file_fingerprints
from fczoo.data.image_files import PREPARATIONS, UPRIGHT_NOTE, UnreadableImage, to_square

SIZE = 256  # side in pixels at which images are stored
TEST_SHARE = 5  # images of a class per test image, without a test split
TABLE_SUFFIXES = (".arrow", ".parquet", ".json")  # whose change is one of the images
IMAGE_STRUCT = {"bytes": "binary", "path": "string"}  # an image in parquet files of other software


def read_tables(dataset: str, folder: Path, given_columns: Mapping[str, str]) -> ImageData:
    """Read the training and the test part of a folder.

    The first split with a name of ``TEST`` and known labels is the test part. Without such a split,
    a fifth of each class is the test part, chosen by a hash of the row numbers.

    Args:
        dataset: Name of the data set.
        folder: Folder of ``save_to_disk`` or of parquet files.
        given_columns: Columns by role; others are found by their types.

    Raises:
        FczooError: A split, column or label is missing, of another type, or ambiguous.
    """
    tables, remarks = open_tables(folder), []
    train_name = (find_named(tables, TRAIN) or (list(tables) if len(tables) == 1 else [""]))[0]
    if not train_name:
        problem = f"{folder} has the splits {', '.join(tables)}, but none is called train"
        raise FczooError(f"{problem}; rename the training split")
    columns = _find_columns(tables[train_name], given_columns, folder)
    labels = {train_name: _labels(tables[train_name], columns["label"], f"split {train_name}")}
    test_name = ""
    for name in find_named(tables, TEST):
        if columns["label"] not in tables[name].features:
            remarks.append(f"split {name} has no column {columns['label']} and is not used")
        elif not test_name:
            labels[name] = _labels(tables[name], columns["label"], f"split {name}", remarks)
            test_name = name if len(labels[name]) else ""
        else:
            remarks.append(f"split {name} is not used; {test_name} is the test part")
    classes, numbers = _classes(tables[train_name].features[columns["label"]], labels[train_name])
    source = _fingerprints(folder)

    def part(name: str, index: np.ndarray | None = None) -> TableImages:
        positions = np.searchsorted(numbers, labels[name])
        if (numbers[positions.clip(max=len(numbers) - 1)] != labels[name]).any():
            problem = f"split {name} of {folder} has labels that no image of {train_name} has"
            raise FczooError(f"{problem}; save them with the same classes")
        index = np.arange(len(positions)) if index is None else index
        table = tables[name].with_format("arrow")
        key = [source, name, columns["image"]]
        return TableImages(dataset, table, columns["image"], name, index, positions[index], key)

    train, split = part(train_name), f"splits {train_name} and {test_name}"
    if test_name:
        test = part(test_name)
    else:
        train, test = _hold_out_test_rows(part, train_name, train.labels)
        split = f"{FRACTIONS[TEST_SHARE]} of every class by sha256 of its row, seed 0"
    groups = None
    if "group" in columns:
        values = _column(tables[train_name], columns["group"], f"split {train_name}")
        groups = np.unique(values, return_inverse=True)[1].astype(np.int64)[train.index]
    return ImageData(train, test, classes, split, tuple(remarks), groups)


def _hold_out_test_rows(
    part: Any, name: str, labels: np.ndarray
) -> tuple["TableImages", "TableImages"]:
    """Return a training and a test part of the only split."""
    by_class = {
        str(k): list(map(str, np.flatnonzero(labels == k).tolist())) for k in np.unique(labels)
    }
    is_test = np.zeros(len(labels), bool)
    is_test[[int(row) for row in choose_test_images(by_class, 0, TEST_SHARE)]] = True
    if not is_test.any():
        problem = f"split {name} is too small to hold out test images"
        raise FczooError(f"{problem}; add a split called test")
    return part(name, np.flatnonzero(~is_test)), part(name, np.flatnonzero(is_test))


def _find_columns(table: Any, given_columns: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the columns by role.

    Raises FczooError if one is missing, of another type, or ambiguous.
    """
    features = table.features
    for column in given_columns.values():
        if column not in features:
            raise FczooError(f"{folder} has no column {column!r}; {nearest(column, features)}")
    images = [name for name, feature in features.items() if _is_image(feature)]
    classes = [name for name, feature in features.items() if hasattr(feature, "names")]
    numbers = [name for name, feature in features.items() if _is_integer(feature)]
    columns = dict(given_columns)
    for role, candidates in (("image", images), ("label", classes or numbers)):
        if role in columns:
            continue
        if len(candidates) != 1:
            count = f"{len(candidates)} columns" if candidates else "no column"
            types = ", ".join(f"{name} ({_type_name(kind)})" for name, kind in features.items())
            kind = "images" if role == "image" else "classes or whole numbers"
            problem = f"{folder} has {count} of {kind} among {types}"
            raise FczooError(f"{problem}; name one with --hf-columns {role}=NAME")
        columns[role] = candidates[0]
    label, image = features[columns["label"]], features[columns["image"]]
    if not (hasattr(label, "names") or _is_integer(label)):
        problem = f"labels in {columns['label']!r} of {folder} have type {_type_name(label)}"
        advice = "convert them to whole numbers, such as with class_encode_column of datasets"
        raise FczooError(f"{problem}; {advice}")
    if not (_is_image(image) or _type_name(image) == "binary"):
        problem = f"column {columns['image']!r} of {folder} holds {_type_name(image)}, not images"
        raise FczooError(f"{problem}; name another with --hf-columns image=NAME")
    return columns


def _is_image(feature: Any) -> bool:
    if isinstance(feature, dict):
        return {name: _type_name(kind) for name, kind in feature.items()} == IMAGE_STRUCT
    return type(feature).__name__ == "Image"


def _is_integer(feature: Any) -> bool:
    return re.fullmatch(r"u?int\d+", _type_name(feature)) is not None


def _type_name(feature: Any) -> str:
    """Return the type of a feature in one word: ``int64``, or ``ClassLabel``."""
    is_class = hasattr(feature, "names")
    dtype = "" if is_class else getattr(feature, "dtype", "")
    return dtype if dtype and "." not in dtype else type(feature).__name__


def _column(table: Any, column: str, where: str) -> np.ndarray:
    """Return the values of a column.

    Raises FczooError if one is missing.
    """
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        problem = f"column {column!r} has no value in {plural(values.null_count, 'row')} of {where}"
        raise FczooError(f"{problem}; remove these rows, or name another with --hf-columns")
    return np.asarray(values.to_numpy())


def _labels(table: Any, column: str, where: str, remarks: list[str] | None = None) -> np.ndarray:
    """Return the labels of a split; none if a test split hides them all as -1.

    Args:
        table: The split.
        column: Name of the column.
        where: Name of the split in messages.
        remarks: List to which a remark on hidden labels is appended; None: they are not allowed.

    Raises:
        FczooError: Labels are missing or negative.
    """
    labels = _column(table, column, where).astype(np.int64)
    negative = int((labels < 0).sum())
    if negative and negative == len(labels) and remarks is not None:
        remarks.append(f"{where} hides its labels (-1) and is not used")
        return labels[:0]
    if not len(labels):
        raise FczooError(f"{where} is empty; save the data set with images in it")
    if negative:
        problem = f"{where} has {plural(negative, 'negative label')} in column {column!r}"
        raise FczooError(f"{problem}; remove these rows")
    return labels


def _classes(feature: Any, labels: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the classes, and the label of each, ascending.

    Raises FczooError if a class has no training image.
    """
    numbers = np.unique(labels)
    names: Iterable[str] | None = getattr(feature, "names", None)
    if names is None:
        return tuple(map(str, numbers.tolist())), numbers
    missing = sorted({*range(len(names := list(names)))} ^ {*numbers.tolist()})
    if missing:
        name = names[missing[0]] if missing[0] < len(names) else missing[0]
        problem = (
            f"class {name} has no training images or is not in the list of class names "
            f"({len(missing)} such classes)"
        )
        raise FczooError(f"{problem}; save the data set with exactly the classes of its images")
    return tuple(names), numbers


def _fingerprints(folder: Path) -> list[Any]:
    """Return the identity of the files of the tables in a folder."""
    return file_fingerprints(
        folder, sorted(file for file in folder.rglob("*") if file.suffix in TABLE_SUFFIXES)
    )


@dataclass(frozen=True)
class TableImages:
    """Rows of one split; ``take`` decodes their images once and caches the pixels on disk."""

    dataset: str
    table: Any  # datasets.Dataset whose rows are Arrow tables
    column: str
    split: str
    index: np.ndarray  # int64 [N] rows of the table
    labels: np.ndarray  # int64 [N]
    source: list[Any]  # identity of the files and of the column, for the cache
    domains: np.ndarray | None = None
    resize: Resize = "crop"  # part of an image that its square shows

    def take(self, index: np.ndarray, size: int | None = None) -> Images:
        """Return some of the images as a memory-mapped array.

        Args:
            index: Positions of the images.
            size: Side in pixels that replaces the stored one.

        Raises:
            FczooError: An image cannot be read; the message names its row.
        """
        pixels = cached_pixels(
            self.dataset.partition(",")[0],
            [self.source, self.index[index].tolist()],
            self.index[index].tolist(),
            size or SIZE,
            PREPARATIONS[self.resize] + UPRIGHT_NOTE,
            self._prepare,
        )
        return Images(pixels, self.labels[index], rows(self.domains, index))

    def _prepare(self, row: int, size: int) -> np.ndarray:
        value = self.table[row].column(self.column)[0].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        try:
            if content is None:
                raise ValueError("it has no content")
            with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as im:
                warnings.simplefilter("ignore")  # about tags and palettes that do not matter here
                return np.asarray(to_square(im, size, upright=True, resize=self.resize))
        except (
            *(OSError, ValueError, SyntaxError, EOFError),
            *(Image.DecompressionBombError, UnreadableImage),
        ) as error:
            problem = f"cannot read the image in row {row} of split {self.split} of {self.dataset}"
            raise UnreadableImage(f"{problem}: {first_line(error)}", "remove that row") from error
