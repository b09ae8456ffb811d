"""Image files on disk: which there are, how they are split, and how one becomes a square of uint8 pixels."""

import hashlib
import itertools
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fczoo.core.errors import FczooError
from fczoo.core.files import printable
from fczoo.data.dataset import ImageData, Images, rows
from fczoo.data.folder_scan import (
    FORMATS,
    Scan,
    comparable,
    count_images,
    raw_name,
    refuse_broken,
    scan,
    subfolders,
)
from fczoo.data.image_cache import cached_pixels
from fczoo.data.text_lists import listed_images

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
        except (UnreadableImage, OSError) as error:
            broken = error if isinstance(error, UnreadableImage) else unreadable(Path(error.filename), error)
            advice = f"get it again, or see `fczoo data check {self.dataset}` for all such files"
            raise FczooError(f"{broken}; {advice}") from error
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
        raise unreadable(path, error) from error
    width, height = rgb.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        rgb = rgb.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(rgb)


def class_folders(root: Path, keep: list[str] | None = None) -> dict[str, list[str]]:
    """Class -> names of its images below ``root``, for all class folders or those to ``keep``.

    Images in subfolders of a class folder belong to the class. Raises FczooError for a class
    without images.
    """
    return filled(root, scan_classes(root, keep))


def scan_classes(root: Path, keep: list[str] | None = None) -> dict[str, Scan]:
    """Find the files of each class folder in ``root``. Raises FczooError for a broken link."""
    found = {name: scan(root / name) for name in (subfolders(root) if keep is None else keep)}
    refuse_broken([link for files in found.values() for link in files.broken])
    return found


def filled(root: Path, found: dict[str, Scan]) -> dict[str, list[str]]:
    """Return class -> names of its images below ``root``.

    Raises FczooError where a class has none, two classes have one name, or there are no classes.
    """
    if empty := [name for name, files in found.items() if not files.images]:
        problem = f"no image in {root / empty[0]} ({len(empty)} such classes)"
        unread = unread_files(root, found)[:1]
        advice = "".join(unread) or "the copy is incomplete or has another layout"
        raise FczooError(f"{problem}; {advice}")
    if not found:
        raise FczooError(f"no class folders in {root}; one folder with images for each class is expected")
    by_name(root, found)
    return {name: [f"{name}/{image}" for image in files.images] for name, files in found.items()}


def by_name(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return the folders by the form of their names that is compared.

    Raises FczooError where two differ only in the encoding of their accents.
    """
    out: dict[str, str] = {}
    for folder in folders:
        if (other := out.setdefault(comparable(folder), folder)) != folder:
            problem = f"two class folders in {root} are called {printable(other)!r}, in two Unicode forms"
            raise FczooError(f"{problem}; move the images of one into the other")
    return out


def unread_files(root: Path, found: dict[str, Scan]) -> list[str]:
    """Return a line for each kind of files below ``root`` that are not read."""
    lines = []
    unread = sum((files.unread for files in found.values()), Counter[str]())
    if total := unread.total():
        kinds = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in unread.most_common(3))
        verb = "image file is" if total == 1 else "image files are"
        lines.append(f"{total} {verb} not read ({kinds}); convert to PNG or JPEG")
    if loose := count_images(root):
        verb = "image lies" if loose == 1 else "images lie"
        lines.append(f"{loose} {verb} in {root} itself, outside of class folders: not read")
    if loops := [link for files in found.values() for link in files.loops]:
        links = "1 link is" if len(loops) == 1 else f"{len(loops)} links are"
        lines.append(f"{links} not followed, to a folder that holds the link: {min(loops)}")
    return lines


def display_names(folders: Iterable[str]) -> tuple[str, ...]:
    """Return class folders as text; with their bytes where invalid UTF-8 makes two look alike."""
    pairs = [(printable(folder), raw_name(folder)) for folder in folders]
    count = Counter(name for name, _ in pairs)
    return tuple(f"{name} ({raw.hex()})" if count[name] > 1 else name for name, raw in pairs)


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
    there = subfolders(test)
    train_scan = scan_classes(train, keep)
    test_scan = scan_classes(test, there if keep is None else [name for name in there if name in keep])
    twins = by_name(test, test_scan)
    paired = {name: twins.pop(comparable(name), "") for name in train_scan}
    missing = sorted(name for name, twin in paired.items() if not twin)
    extra = sorted(name for name in twins.values() if test_scan[name].images)  # else nothing is lost
    if missing or extra:
        raise FczooError(_unpaired(train, test, missing, extra))
    train_folders = filled(train, train_scan)
    test_folders = filled(test, {twin: test_scan[twin] for twin in paired.values()})
    return ImageData(
        part(dataset, train, train_folders, size),
        part(dataset, test, test_folders, size),
        classes or display_names(train_folders),
        f"folders {train.name} and {test.name}",
        (
            *(f"{train.name}/: {line}" for line in unread_files(train, train_scan)),
            *(f"{test.name}/: {line}" for line in unread_files(test, test_scan)),
        ),
    )


def _unpaired(train: Path, test: Path, missing: list[str], extra: list[str]) -> str:
    """Say which class only one part has."""
    name = printable((missing or extra)[0])
    problem = f"{train} and {test} have different classes: {name} is in one of them only"
    place = train.name if missing else test.name
    capitals = {comparable(folder).casefold() for folder in extra}
    if missing and comparable(missing[0]).casefold() in capitals:
        return f"{problem} ({place}/), in these capitals; give the folder one name"
    return f"{problem} ({place}/); both parts must hold every class"


def one_folder(
    dataset: str, root: Path, size: int, classes: tuple[str, ...] | None = None, seed: int = 0
) -> ImageData:
    """A data set of ``CLASS/*`` split into training and test part.

    The test part is what ``test.txt`` in the folder names (one path a line, below the folder); without
    that file a fifth of every class, see ``held_out``. Raises FczooError for a list that names other
    files or leaves a class without training.
    """
    found = scan_classes(root)
    folders = filled(root, found)
    listed = root / "test.txt"
    if listed.is_file():
        test = listed_images(listed, itertools.chain.from_iterable(folders.values()))
        split = f"test.txt, sha256 {hashlib.sha256(listed.read_bytes()).hexdigest()}"
    else:
        split = f"a fifth of every class by sha256, seed {seed}"
        test = held_out(folders, seed)
    train_folders, test_folders = {}, {}
    for name, images in folders.items():
        train_folders[name] = [image for image in images if image not in test]
        test_folders[name] = [image for image in images if image in test]
        if not train_folders[name]:
            problem = f"class {name} in {root} has no training image left"
            raise FczooError(f"{problem}; add images, or correct {listed.name}")
    if not test:
        advice = "give at least two images per class, or train/ and test/ folders"
        raise FczooError(f"{root} is too small to hold out test images; {advice}")
    return ImageData(
        part(dataset, root, train_folders, size),
        part(dataset, root, test_folders, size),
        classes or display_names(folders),
        split,
        tuple(unread_files(root, found)),
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
        return hashlib.sha256(f"{seed}:".encode() + raw_name(name)).digest()

    chosen: set[str] = set()
    for images, count in zip(folders.values(), counts.tolist(), strict=True):
        chosen.update(sorted(images, key=draw)[:count])
    return chosen


def class_names(folders: Sequence[str], table: Path) -> tuple[str, ...]:
    """Readable names of WordNet ids, by a table of ``ID NAME`` lines.

    A name is the first synonym, with the id where two classes share it. An id that the table lacks keeps its
    own name, and so do all without a table.
    """
    synonyms: dict[str, str] = {}
    if table.is_file():
        for line in table.read_text(encoding="utf-8-sig", errors="replace").splitlines():
            if match := re.match(r"(n\d{8})\s+([^,]+)", line):
                synonyms[match[1]] = match[2].strip().replace("_", " ")
    names = [synonyms.get(folder, folder) for folder in folders]
    shared = {name for name, count in Counter(names).items() if count > 1}
    pairs = zip(names, folders, strict=True)
    return tuple(f"{name} ({folder})" if name in shared else name for name, folder in pairs)


def unreadable(path: Path, error: Exception) -> UnreadableImage:
    """Return the error of a file, with its path and the reason on one line."""
    if path.is_symlink() and not path.exists():
        return UnreadableImage(f"cannot read image {path}: broken symbolic link to {os.readlink(path)}")
    text = getattr(error, "strerror", None) or str(error).replace(f" '{path}'", "") or type(error).__name__
    return UnreadableImage(f"cannot read image {path}: {text.splitlines()[0]}")
