"""Image files on disk: class folders, parts of a data set, and decoding to square uint8 pixels."""

import itertools
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fczoo.core.errors import FczooError, printable
from fczoo.data.dataset import ImageData, Images, Resize, rows
from fczoo.data.folder_scan import (
    FORMATS,
    Scan,
    count_images,
    normalise_name,
    raw_name,
    refuse_broken,
    scan,
    subfolders,
)
from fczoo.data.image_cache import cached_pixels, file_fingerprints

DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of more than 8 bits, which Pillow would clip to white silently."""
PREPARATIONS = {
    "crop": "RGB as Pillow converts it; the largest centred square, bicubic",
    "squash": "RGB as Pillow converts it; the whole image, bicubic",
}
"""Part of the cache key. Change the words when ``prepare`` changes what it returns."""
UPRIGHT_NOTE = "; turned by its orientation tag"
"""The rest of it, for images of users."""


@dataclass(frozen=True)
class ImageFiles:
    """One part of a data set as files; ``take`` decodes them once and caches the pixels on disk."""

    dataset: str
    root: Path
    names: tuple[str, ...]  # below root, with forward slashes
    labels: np.ndarray  # int64 [N]
    size: int  # side in pixels at which they are kept
    domains: np.ndarray | None = None  # int64 [N], where the data set has several
    upright: bool = False  # whether orientation tags turn the images
    resize: Resize = "crop"  # part of an image that its square shows

    def take(self, index: np.ndarray, size: int | None = None, cache: Path | None = None) -> Images:
        """Return some of the images as a memory-mapped array.

        Args:
            index: Positions of the images.
            size: Side in pixels that replaces the stored one.
            cache: Cache folder. Default: the user's.

        Raises:
            FczooError: A file cannot be read; the message names it.
        """
        files = [self.root / self.names[i] for i in index]
        preparation = PREPARATIONS[self.resize] + (UPRIGHT_NOTE if self.upright else "")
        view = partial(prepare, upright=self.upright, resize=self.resize)
        source = self.dataset, file_fingerprints(self.root, files), files, size or self.size
        try:
            pixels = cached_pixels(*source, preparation, view, cache)
        except (UnreadableImage, OSError) as error:
            broken = (
                error
                if isinstance(error, UnreadableImage)
                else unreadable_image_error(Path(error.filename), error)
            )
            advice = f"or see `fczoo data check {self.dataset}` for all such files"
            raise FczooError(f"{broken}, {advice}") from error
        return Images(pixels, self.labels[index], rows(self.domains, index))


class UnreadableImage(FczooError):
    """A file that is not an image, a damaged one, or one with too many bits.

    Args:
        problem: What is wrong with it.
        advice: What to do.
    """

    def __init__(self, problem: str, advice: str = "get it again"):
        super().__init__(f"{problem}; {advice}")
        self.problem, self.advice = problem, advice


def prepare(path: Path, size: int, upright: bool = False, resize: Resize = "crop") -> np.ndarray:
    """Return an image file as a square, resized (bicubic).

    Grey, palette and CMYK become RGB; transparency is dropped, and orientation tags are ignored by
    default, as torchvision's loader does. A crop is cut before it is resized, so that a long thin
    image does not grow without bound.

    Args:
        path: Image file.
        size: Side of the result in pixels.
        upright: Whether to turn the image by its orientation tag, as viewers show it.
        resize: Part of the image that the square shows, see ``Resize``.

    Returns:
        Pixels, uint8 [size, size, 3].

    Raises:
        UnreadableImage: The file is damaged, none of ``FORMATS`` reads it, or it has more than 8
            bits per channel.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not an ordinary file")
        with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # about tags and palettes that do not matter here
            return np.asarray(to_square(image, size, upright, resize))
    except (
        *(OSError, ValueError, SyntaxError, EOFError),
        *(Image.DecompressionBombError, UnreadableImage),
    ) as error:
        raise unreadable_image_error(path, error) from error


def to_square(
    image: Image.Image, size: int, upright: bool = False, resize: Resize = "crop"
) -> Image.Image:
    """Return an image as a square in RGB, resized (bicubic).

    Args:
        image: Image of any size.
        size: Side of the result in pixels.
        upright: Whether to turn the image by its orientation tag.
        resize: Part of the image that the square shows, see ``Resize``.

    Raises:
        UnreadableImage: The image has more than 8 bits per channel.
    """
    if image.mode in DEEP_MODES:
        raise UnreadableImage(
            f"mode {image.mode} has more than 8 bits per channel", "convert it to 8 bits"
        )
    if upright:
        image = ImageOps.exif_transpose(image)
    rgb = image.convert("RGB")
    width, height = rgb.size
    if (width, height) == (size, size):
        return rgb
    side = min(width, height)
    left, top = ((width - side) / 2, (height - side) / 2) if resize == "crop" else (0, 0)
    box = left, top, width - left, height - top
    return rgb.resize((size, size), Image.Resampling.BICUBIC, box=box)


def class_folders(root: Path, keep: list[str] | None = None) -> dict[str, list[str]]:
    """Return class -> names of its images below a folder.

    Images in subfolders of a class folder belong to the class.

    Args:
        root: Folder of the class folders.
        keep: Names of class folders. Default: all.

    Raises:
        FczooError: A class does not have images.
    """
    return list_images(root, scan_classes(root, keep))


def scan_classes(root: Path, keep: list[str] | None = None) -> dict[str, Scan]:
    """Find the files of each class folder.

    Args:
        root: Folder of the class folders.
        keep: Names of class folders. Default: all.

    Raises:
        FczooError: A link is broken.
    """
    scans = {name: scan(root / name) for name in (subfolders(root) if keep is None else keep)}
    refuse_broken([link for files in scans.values() for link in files.broken])
    return scans


def list_images(root: Path, scans: dict[str, Scan]) -> dict[str, list[str]]:
    """Return class -> names of its images below a folder.

    Args:
        root: Folder of the class folders.
        scans: Result of ``scan_classes``.

    Raises:
        FczooError: A class has no image, two classes have one name, or class folders are missing.
    """
    if empty := [name for name, files in scans.items() if not files.images]:
        problem = f"no image in {root / empty[0]} ({len(empty)} such classes)"
        unread = describe_unread_files(root, scans)[:1]
        advice = "".join(unread) or "the copy is incomplete or has another layout"
        raise FczooError(f"{problem}; {advice}")
    if not scans:
        raise FczooError(
            f"no class folders in {root}; one folder with images for each class is expected"
        )
    folders_by_name(root, scans)
    return {name: [f"{name}/{image}" for image in files.images] for name, files in scans.items()}


def folders_by_name(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return normalised name -> folder, for names that are compared.

    Args:
        root: Folder of the class folders.
        folders: Names of class folders.

    Raises:
        FczooError: Two names differ only in the encoding of their accents.
    """
    out: dict[str, str] = {}
    for folder in folders:
        if (first_folder := out.setdefault(normalise_name(folder), folder)) != folder:
            problem = (
                f"two class folders in {root} are called {printable(first_folder)!r}, in two "
                "Unicode forms"
            )
            raise FczooError(f"{problem}; move the images of one into the other")
    return out


def describe_unread_files(root: Path, scans: dict[str, Scan]) -> list[str]:
    """Return a line for each kind of files that are not read.

    Args:
        root: Folder of the class folders.
        scans: Result of ``scan_classes``.
    """
    lines = []
    unread = sum((files.unread for files in scans.values()), Counter[str]())
    if total := unread.total():
        kinds = ", ".join(
            f"{count} {suffix or 'without suffix'}" for suffix, count in unread.most_common(3)
        )
        verb = "image file is" if total == 1 else "image files are"
        lines.append(f"{total} {verb} not read ({kinds}); convert to PNG or JPEG")
    if loose := count_images(root):
        verb = "image is" if loose == 1 else "images are"
        lines.append(f"{loose} {verb} in {root} itself, outside of class folders: not read")
    if loops := [link for files in scans.values() for link in files.loops]:
        links = "1 link is" if len(loops) == 1 else f"{len(loops)} links are"
        lines.append(f"{links} not followed, because the target contains the link: {min(loops)}")
    return lines


def display_names(folders: Iterable[str]) -> tuple[str, ...]:
    """Return class folders as text, with their bytes if invalid UTF-8 makes two look alike.

    Args:
        folders: Names of class folders.
    """
    longest = 255  # characters of a name on any file system
    pairs = [(printable(folder, longest), raw_name(folder)) for folder in folders]
    count = Counter(name for name, _ in pairs)
    return tuple(f"{name} ({raw.hex()})" if count[name] > 1 else name for name, raw in pairs)


def make_part(dataset: str, root: Path, folders: dict[str, list[str]], size: int) -> ImageFiles:
    """Return one part of a data set; labels are the positions of the class folders.

    Args:
        dataset: Name of the data set.
        root: Folder of the class folders.
        folders: Class -> names of its images below ``root``.
        size: Side in pixels at which images are stored.
    """
    labels = np.repeat(np.arange(len(folders)), [len(images) for images in folders.values()])
    names = tuple(itertools.chain.from_iterable(folders.values()))
    return ImageFiles(dataset, root, names, labels, size)


def make_rows(
    dataset: str, root: Path, rows: Sequence[tuple[str, int, int]], size: int
) -> ImageFiles:
    """Return one part of a data set with several domains.

    Args:
        dataset: Name of the data set.
        root: Folder of the images.
        rows: Name below ``root``, label and domain of each image.
        size: Side in pixels at which images are stored.
    """
    labels, domains = (np.array([row[k] for row in rows], np.int64) for k in (1, 2))
    return ImageFiles(dataset, root, tuple(row[0] for row in rows), labels, size, domains)


def turned_upright(data: ImageData) -> ImageData:
    """Return a data set whose files are turned by their orientation tags, as viewers show them.

    Published data sets ignore these tags, because published results use the pixels as stored.

    Args:
        data: Data set of a user.
    """
    train, test = (
        replace(part, upright=True) if isinstance(part, ImageFiles) else part
        for part in (data.train, data.test)
    )
    return data._replace(train=train, test=test)


def read_train_test_folders(
    dataset: str,
    train: Path,
    test: Path,
    size: int,
    classes: tuple[str, ...] | None = None,
    keep: list[str] | None = None,
) -> ImageData:
    """Return a data set of ``train/CLASS/*`` and ``test/CLASS/*``.

    Args:
        dataset: Name of the data set.
        train: Folder of the training part.
        test: Folder of the test part.
        size: Side in pixels at which images are stored.
        classes: Names of the classes. Default: the names of the folders.
        keep: Names of class folders. Default: all.

    Raises:
        FczooError: The two parts have different classes.
    """
    test_names = subfolders(test)
    train_scan = scan_classes(train, keep)
    test_scan = scan_classes(
        test, test_names if keep is None else [name for name in test_names if name in keep]
    )
    twins = folders_by_name(test, test_scan)
    test_folder_of = {name: twins.pop(normalise_name(name), "") for name in train_scan}
    missing = sorted(name for name, twin in test_folder_of.items() if not twin)
    # empty test folders of other names are ignored, since no image is lost
    extra = sorted(name for name in twins.values() if test_scan[name].images)
    if missing or extra:
        raise FczooError(_describe_difference(train, test, missing, extra))
    train_folders = list_images(train, train_scan)
    test_folders = list_images(test, {twin: test_scan[twin] for twin in test_folder_of.values()})
    return ImageData(
        make_part(dataset, train, train_folders, size),
        make_part(dataset, test, test_folders, size),
        classes or display_names(train_folders),
        f"folders {train.name} and {test.name}",
        (
            *(f"{train.name}/: {line}" for line in describe_unread_files(train, train_scan)),
            *(f"{test.name}/: {line}" for line in describe_unread_files(test, test_scan)),
        ),
    )


def _describe_difference(train: Path, test: Path, missing: list[str], extra: list[str]) -> str:
    """Return which class is in only one part."""
    name = printable((missing or extra)[0])
    part = train.name if missing else test.name
    problem = f"{train} and {test} have different classes: {name} is only in {part}/"
    capitals = {normalise_name(folder).casefold() for folder in extra}
    if missing and normalise_name(missing[0]).casefold() in capitals:
        return f"{problem}; use the same upper and lower case in both"
    return f"{problem}; both parts must have all classes"


def unreadable_image_error(path: Path, error: Exception) -> UnreadableImage:
    """Return the error of a file, with its path and the reason on one line.

    Args:
        path: Image file.
        error: Reason why it cannot be read.
    """
    if path.is_symlink() and not path.exists():
        return UnreadableImage(
            f"cannot read image {path}: broken symbolic link to {os.readlink(path)}"
        )
    if isinstance(error, UnreadableImage):
        return UnreadableImage(f"cannot read image {path}: {error.problem}", error.advice)
    text = (
        getattr(error, "strerror", None)
        or str(error).replace(f" '{path}'", "")
        or type(error).__name__
    )
    return UnreadableImage(f"cannot read image {path}: {text.splitlines()[0]}")
