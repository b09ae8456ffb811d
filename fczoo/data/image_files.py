"""Image files on disk: which there are, how they are split, and how one becomes a square of uint8 pixels."""

import hashlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fczoo.core.errors import FczooError
from fczoo.data.dataset import ImageData, Images
from fczoo.data.image_cache import cached_pixels

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # modes that Pillow would clip to white without a word
PREPARATION = "RGB as Pillow converts it; the largest centred square, bicubic"
"""Part of the cache key. Change the words when ``prepare`` changes what it returns."""


@dataclass(frozen=True)
class ImageFiles:
    """One part of a data set as files; ``take`` decodes them once and keeps the pixels on disk."""

    dataset: str
    root: Path
    names: tuple[str, ...]  # below root, with forward slashes
    labels: np.ndarray  # int64 [N]
    size: int  # side in pixels at which they are kept

    def take(self, index: np.ndarray, size: int | None = None) -> Images:
        """Some of the images, as a memory-mapped array. Raises FczooError naming a file that cannot be read."""
        files = [self.root / self.names[i] for i in index]
        try:
            pixels = cached_pixels(self.dataset, self.root, files, size or self.size, PREPARATION, prepare)
        except UnreadableImage as error:
            raise FczooError(
                f"{error}; get it again, or see `fczoo data check {self.dataset}` for all such files"
            ) from error
        return Images(pixels, self.labels[index])


class UnreadableImage(FczooError):
    """A file that is no image, or a broken one."""


def prepare(path: Path, size: int) -> np.ndarray:
    """The image as uint8 [size, size, 3]: its largest centred square, resized. Raises UnreadableImage.

    Grey, palette and CMYK become RGB; transparency is dropped, and orientation tags are ignored, as
    torchvision's loader does. Cutting the square first keeps a long thin image from growing without
    bound.
    """
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")  # about tags and palettes that do not matter here
            if image.mode in DEEP:
                raise ValueError(f"mode {image.mode} has more than 8 bits a channel; convert it")
            rgb = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"cannot read image {path}: {_reason(error, path)}") from error
    width, height = rgb.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        rgb = rgb.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(rgb)


def images_in(folder: Path) -> list[str]:
    """Names of the image files in a folder, sorted; hidden ones (such as macOS leaves in archives) are none."""
    if not folder.is_dir():
        raise FczooError(f"no folder {folder}")
    return sorted(
        f.name for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")
    )


def class_ids(place: Path) -> list[str]:
    """Names of the class folders in ``place``, sorted. Raises FczooError when there is no such place."""
    if not place.is_dir():
        raise FczooError(f"no folder {place}; see `fczoo show` for the layout that is expected")
    return sorted(f.name for f in place.iterdir() if f.is_dir() and not f.name.startswith("."))


def class_folders(place: Path, inner: str = "", keep: list[str] | None = None) -> dict[str, list[str]]:
    """Each class, or those to keep -> names of its images below ``place``. Raises FczooError for a class without any."""
    out = {}
    for folder in class_ids(place) if keep is None else keep:
        out[folder] = [
            "/".join(filter(None, (folder, inner, name))) for name in images_in(place / folder / inner)
        ]
    if empty := [name for name, images in out.items() if not images]:
        raise FczooError(
            f"no image in {place / empty[0] / inner} ({len(empty)} such classes); the copy is incomplete or has another layout"
        )
    if not out:
        raise FczooError(f"no class folders in {place}; one folder with images for each class is expected")
    return out


def part(dataset: str, root: Path, folders: dict[str, list[str]], size: int) -> ImageFiles:
    """One part from class folders; labels are the folders' positions."""
    labels = np.repeat(np.arange(len(folders)), [len(images) for images in folders.values()])
    return ImageFiles(
        dataset, root, tuple(name for images in folders.values() for name in images), labels, size
    )


def two_folders(
    dataset: str,
    train: Path,
    test: Path,
    size: int,
    classes: tuple[str, ...] | None = None,
    keep: list[str] | None = None,
) -> ImageData:
    """A data set of ``train/CLASS/*`` and ``test/CLASS/*``; ``keep`` takes some of the classes only.

    Raises FczooError when the two have different classes.
    """
    if odd := sorted(set(class_ids(train)) ^ set(class_ids(test))):
        raise FczooError(
            f"{train} and {test} have different classes: {odd[0]} is in one of them only; both parts must hold every class"
        )
    first, second = class_folders(train, keep=keep), class_folders(test, keep=keep)
    return ImageData(
        part(dataset, train, first, size),
        part(dataset, test, second, size),
        classes or tuple(first),
        f"folders {train.name} and {test.name}",
    )


def one_folder(
    dataset: str, place: Path, size: int, classes: tuple[str, ...] | None = None, seed: int = 0
) -> ImageData:
    """A data set of ``CLASS/*`` split into training and test part.

    The test part is what ``test.txt`` in the folder names (one path a line, below the folder); without
    that file a fifth of every class, see ``held_out``. Raises FczooError for a list that names other
    files or leaves a class without training.
    """
    folders = class_folders(place)
    listed = place / "test.txt"
    if listed.is_file():
        split = f"test.txt, sha256 {hashlib.sha256(listed.read_bytes()).hexdigest()}"
        test = {line.strip() for line in listed.read_text().splitlines() if line.strip()}
        if unknown := sorted(test - {name for images in folders.values() for name in images}):
            raise FczooError(
                f"{listed} names {unknown[0]}, which is not in {place} ({len(unknown)} such lines)"
            )
    else:
        split = f"a fifth of every class by sha256, seed {seed}"
        test = held_out(folders, seed)
    train = {name: [i for i in images if i not in test] for name, images in folders.items()}
    if bare := [name for name, images in train.items() if not images]:
        raise FczooError(
            f"class {bare[0]} in {place} has no training image left; add images, or mend {listed.name}"
        )
    if not test:
        raise FczooError(
            f"{place} is too small to hold out test images; give at least two images a class, or train/ and test/ folders"
        )
    rest = {name: [i for i in images if i in test] for name, images in folders.items()}
    return ImageData(
        part(dataset, place, train, size), part(dataset, place, rest, size), classes or tuple(folders), split
    )


def held_out(folders: dict[str, list[str]], seed: int) -> set[str]:
    """A fifth of the images, the same everywhere: of 30,000 exactly 6,000, of every class a fifth but for rounding.

    Each class gives the images whose sha256 of ``SEED:NAME`` comes first, so that neither the order of
    the files nor a library's random numbers matter. The images missing to a fifth of the whole come from
    the classes with the largest remainders; a class with at least two images gives at least one.
    """
    sizes = np.array([len(images) for images in folders.values()])
    counts = np.maximum(sizes // 5, np.minimum(sizes - 1, 1))
    missing = round(int(sizes.sum()) / 5) - int(counts.sum())
    remainder = np.where((counts == sizes // 5) & (sizes > 1), sizes % 5, 0)
    counts[np.argsort(-remainder, kind="stable")[: max(missing, 0)]] += 1
    counts = np.minimum(counts, sizes - 1)
    out: set[str] = set()
    for images, count in zip(folders.values(), counts.tolist(), strict=True):
        out.update(
            sorted(images, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())[:count]
        )
    return out


def class_names(folders: list[str], table: Path) -> tuple[str, ...]:
    """Names of WordNet ids by a table of ``ID NAME`` lines: the first synonym, with the id where two classes share it.

    An id that the table lacks keeps its own name, and so do all without a table.
    """
    known: dict[str, str] = {}
    if table.is_file():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            if match := re.match(r"(n\d{8})\s+([^,]+)", line):
                known[match[1]] = match[2].strip().replace("_", " ")
    names = [known.get(folder, folder) for folder in folders]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({folder})"
        for name, folder in zip(names, folders, strict=True)
    )


def _reason(error: Exception, path: Path) -> str:
    return (
        getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "") or type(error).__name__
    ).splitlines()[0]
