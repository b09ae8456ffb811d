"""The search for image files below a folder: suffixes, order, links and skipped files."""

import os
import unicodedata
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image

from fczoo.core.errors import FczooError

SUFFIXES = (
    ".apng",
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".pnm",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's readers for these suffixes. No other reader is used: one starts Ghostscript."""
STUBS = {"BUFR", "GRIB", "HDF5", "MPEG"}  # formats that Pillow names but cannot decode
SYSTEM_FOLDERS = (
    "$recycle.bin",
    "@eadir",
    "__macosx",
    "__pycache__",
    "lost+found",
    "system volume information",
)
"""Folders of thumbnails and copies that systems and archivers create, in lower case."""


@dataclass
class Scan:
    """The files below one folder."""

    images: list[str] = field(default_factory=list)  # names below it, with forward slashes
    unread: Counter[str] = field(default_factory=Counter)  # suffix -> files that only Pillow reads
    broken: list[Path] = field(default_factory=list)  # symbolic links to nothing
    loops: list[Path] = field(default_factory=list)  # links to a folder that holds them


def scan(folder: Path) -> Scan:
    """Find the images in ``folder`` and its subfolders, in the order of torchvision's ImageFolder.

    Links to folders are followed. Hidden files and folders are skipped, as macOS and notebooks
    create such. Raises FczooError when a folder cannot be read.
    """
    out, found, kinds = Scan(), list[tuple[str, str]](), dict[str, bool]()
    pending = [(folder, "", frozenset[tuple[int, int]]())]
    while pending:
        place, below, above = pending.pop()
        entries, identity = _entries(place)
        if identity in above:
            out.loops.append(place)
            continue
        for entry in entries:
            suffix = os.path.splitext(entry.name)[1].lower()
            if _is_broken(entry):
                out.broken.append(Path(entry.path))
            elif entry.is_dir():
                pending.append((Path(entry.path), os.path.join(below, entry.name), above | {identity}))
            elif suffix in SUFFIXES:
                found.append((below, entry.name))
            elif entry.is_file() and _pillow_reads(entry.path, suffix, kinds):
                out.unread[suffix] += 1
    out.images = [f"{below.replace(os.sep, '/')}/{name}" if below else name for below, name in sorted(found)]
    return out


def subfolders(root: Path) -> list[str]:
    """Return the names of the visible folders in ``root``, sorted.

    Raises FczooError for a broken link and when ``root`` cannot be read.
    """
    entries, _ = _entries(root)
    refuse_broken([Path(entry.path) for entry in entries if _is_broken(entry)])
    return sorted(entry.name for entry in entries if entry.is_dir())


def has_images(folder: Path) -> bool:
    """Return whether image files are directly in the folder."""
    return count_images(folder) > 0


def count_images(folder: Path) -> int:
    """Count the image files directly in the folder."""
    names = (entry.name.lower() for entry in _entries(folder)[0] if not entry.is_dir())
    return sum(os.path.splitext(name)[1] in SUFFIXES for name in names)


def refuse_broken(links: list[Path]) -> None:
    """Raise FczooError, naming the first, where there are symbolic links to nothing."""
    if links:
        first = min(links)
        more = f" ({len(links)} such links)" if len(links) > 1 else ""
        problem = f"broken symbolic link {first} -> {os.readlink(first)}{more}"
        raise FczooError(f"{problem}; bring back what it points to, or remove it")


def raw_name(name: str) -> bytes:
    """Return the bytes of a file name, whatever the locale."""
    return name.encode("utf-8", "surrogateescape")


def comparable(name: str) -> str:
    """Return a file name in the form in which names are compared.

    macOS stores accents apart from their letters (NFD), other systems and most lists do not (NFC).
    """
    return unicodedata.normalize("NFC", raw_name(name).decode("utf-8", "surrogateescape"))


def _entries(folder: Path) -> tuple[list["os.DirEntry[str]"], tuple[int, int]]:
    """Return what is visible in a folder, and the folder's identity."""
    try:
        about = os.stat(folder)
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not _is_hidden(entry.name)], (about.st_dev, about.st_ino)
    except FileNotFoundError:
        raise FczooError(f"no folder {folder}; see `fczoo show` for the layout that is expected") from None
    except OSError as error:
        raise FczooError(f"cannot read folder {folder}: {error.strerror}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def _is_broken(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


@cache
def _other_suffixes() -> frozenset[str]:
    """Return the suffixes of all of Pillow's readers of pictures."""
    Image.init()
    readers = Image.OPEN.keys() - STUBS
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in readers)


def _pillow_reads(path: str, suffix: str, kinds: dict[str, bool]) -> bool:
    """Return whether a file is an image, by its suffix or, for an unknown one, by its content.

    ``kinds`` remembers what the first file of an unknown suffix was.
    """
    if suffix in _other_suffixes():
        return True
    if not suffix:
        return _opens(path)
    if suffix not in kinds:
        kinds[suffix] = _opens(path)
    return kinds[suffix]


def _opens(path: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.open(path, formats=FORMATS).close()
        return True
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
