"""Image files on disk: which there are, how they are split, and how one becomes a square of uint8 pixels."""

import hashlib
import itertools
import re
import stat
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fczoo.core.errors import FczooError
from fczoo.data.dataset import ImageData, Images, rows
from fczoo.data.image_cache import cached_pixels

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's readers for these suffixes. No other is used, whatever a file's name: one starts Ghostscript."""
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
    domains: np.ndarray | None = None  # int64 [N], where the data set has several

    def take(self, index: np.ndarray, size: int | None = None, cache: Path | None = None) -> Images:
        """Some of the images, as a memory-mapped array; ``cache`` is a folder for it other than the user's.

        Raises FczooError naming a file that cannot be read.
        """
        files = [self.root / self.names[i] for i in index]
        try:
            side = size or self.size
            pixels = cached_pixels(self.dataset, self.root, files, side, PREPARATION, prepare, cache)
        except UnreadableImage as error:
            advice = f"get it again, or see `fczoo data check {self.dataset}` for all such files"
            raise FczooError(f"{error}; {advice}") from error
        return Images(pixels, self.labels[index], rows(self.domains, index))


class UnreadableImage(FczooError):
    """A file that is no image, or a broken one."""


def prepare(path: Path, size: int) -> np.ndarray:
    """The image as uint8 [size, size, 3]: its largest centred square, resized (bicubic).

    Grey, palette and CMYK become RGB; transparency is dropped, and orientation tags are ignored, as
    torchvision's loader does. Cutting the square first keeps a long thin image from growing without
    bound. Raises UnreadableImage for a broken file and for one that none of ``FORMATS`` reads.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no ordinary file")
        with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as image:
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
    """Names of the image files in a folder, sorted, without hidden ones (macOS leaves such in archives).

    Raises FczooError when there is no such folder.
    """
    if not folder.is_dir():
        raise FczooError(f"no folder {folder}")
    visible = (file for file in folder.iterdir() if not file.name.startswith("."))
    return sorted(file.name for file in visible if file.suffix.lower() in SUFFIXES)


def class_ids(root: Path) -> list[str]:
    """Names of the class folders in ``root``, sorted. Raises FczooError when there is no such folder."""
    if not root.is_dir():
        raise FczooError(f"no folder {root}; see `fczoo show` for the layout that is expected")
    return sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))


def class_folders(root: Path, inner: str = "", keep: list[str] | None = None) -> dict[str, list[str]]:
    """Class -> names of its images below ``root``, for all class folders or those to ``keep``.

    ``inner`` is a folder inside each class folder. Raises FczooError for a class without images.
    """
    found = {}
    for folder in class_ids(root) if keep is None else keep:
        prefix = f"{folder}/{inner}/" if inner else f"{folder}/"
        found[folder] = [prefix + name for name in images_in(root / folder / inner)]
    if empty := [name for name, images in found.items() if not images]:
        problem = f"no image in {root / empty[0] / inner} ({len(empty)} such classes)"
        raise FczooError(f"{problem}; the copy is incomplete or has another layout")
    if not found:
        raise FczooError(f"no class folders in {root}; one folder with images for each class is expected")
    return found


def part(dataset: str, root: Path, folders: dict[str, list[str]], size: int) -> ImageFiles:
    """One part of a data set from class folders; labels are the folders' positions."""
    labels = np.repeat(np.arange(len(folders)), [len(images) for images in folders.values()])
    names = tuple(itertools.chain.from_iterable(folders.values()))
    return ImageFiles(dataset, root, names, labels, size)


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
    if unpaired := sorted(set(class_ids(train)) ^ set(class_ids(test))):
        problem = f"{train} and {test} have different classes: {unpaired[0]} is in one of them only"
        raise FczooError(f"{problem}; both parts must hold every class")
    train_folders, test_folders = class_folders(train, keep=keep), class_folders(test, keep=keep)
    return ImageData(
        part(dataset, train, train_folders, size),
        part(dataset, test, test_folders, size),
        classes or tuple(train_folders),
        f"folders {train.name} and {test.name}",
    )


def one_folder(
    dataset: str, root: Path, size: int, classes: tuple[str, ...] | None = None, seed: int = 0
) -> ImageData:
    """A data set of ``CLASS/*`` split into training and test part.

    The test part is what ``test.txt`` in the folder names (one path a line, below the folder); without
    that file a fifth of every class, see ``held_out``. Raises FczooError for a list that names other
    files or leaves a class without training.
    """
    folders = class_folders(root)
    listed = root / "test.txt"
    if listed.is_file():
        split = f"test.txt, sha256 {hashlib.sha256(listed.read_bytes()).hexdigest()}"
        test = {line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()}
        if unknown := sorted(test - set(itertools.chain.from_iterable(folders.values()))):
            problem = f"{listed} names {unknown[0]}, which is not in {root}"
            raise FczooError(f"{problem} ({len(unknown)} such lines)")
    else:
        split = f"a fifth of every class by sha256, seed {seed}"
        test = held_out(folders, seed)
    train_folders, test_folders = {}, {}
    for name, images in folders.items():
        train_folders[name] = [image for image in images if image not in test]
        test_folders[name] = [image for image in images if image in test]
        if not train_folders[name]:
            problem = f"class {name} in {root} has no training image left"
            raise FczooError(f"{problem}; add images, or mend {listed.name}")
    if not test:
        advice = "give at least two images a class, or train/ and test/ folders"
        raise FczooError(f"{root} is too small to hold out test images; {advice}")
    return ImageData(
        part(dataset, root, train_folders, size),
        part(dataset, root, test_folders, size),
        classes or tuple(folders),
        split,
    )


def held_out(folders: dict[str, list[str]], seed: int) -> set[str]:
    """A fifth of the images, the same on every machine: 6,000 of 30,000, about a fifth of every class.

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

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode()).digest()

    chosen: set[str] = set()
    for images, count in zip(folders.values(), counts.tolist(), strict=True):
        chosen.update(sorted(images, key=draw)[:count])
    return chosen


def class_names(folders: list[str], table: Path) -> tuple[str, ...]:
    """Readable names of WordNet ids, by a table of ``ID NAME`` lines.

    A name is the first synonym, with the id where two classes share it. An id that the table lacks keeps its
    own name, and so do all without a table.
    """
    synonyms: dict[str, str] = {}
    if table.is_file():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            if match := re.match(r"(n\d{8})\s+([^,]+)", line):
                synonyms[match[1]] = match[2].strip().replace("_", " ")
    names = [synonyms.get(folder, folder) for folder in folders]
    shared = {name for name, count in Counter(names).items() if count > 1}
    pairs = zip(names, folders, strict=True)
    return tuple(f"{name} ({folder})" if name in shared else name for name, folder in pairs)


def _reason(error: Exception, path: Path) -> str:
    """What an error says of a file, on one line, without repeating its path."""
    words = getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "") or type(error).__name__
    return words.splitlines()[0]
