"""The search for image files below a folder: suffixes, order, links and skipped files."""

import os
import posixpath
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
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

TRAIN = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation", "dev")
"""Names of the parts and of their lists, in any capitals, in order of preference."""


@dataclass
class Scan:
    """The files below one folder."""

    images: list[str] = field(default_factory=list)  # names below it, with forward slashes
    unread: Counter[str] = field(default_factory=Counter)  # suffix -> files that only Pillow reads
    broken: list[Path] = field(default_factory=list)  # symbolic links to nothing
    loops: list[Path] = field(default_factory=list)  # links to a folder that holds them


def scan(folder: Path) -> Scan:
    """Find the images in a folder and its subfolders, in the order of torchvision's ImageFolder.

    Links to folders are followed. Hidden files and folders are skipped, because macOS and notebooks
    create them.

    Args:
        folder: Folder to search.

    Raises:
        FczooError: A folder cannot be read.
    """
    out, images, kinds = Scan(), list[tuple[str, str]](), dict[str, bool]()
    pending = [(folder, "", frozenset[tuple[int, int]]())]
    while pending:
        current_folder, below, above = pending.pop()
        entries, identity = _entries(current_folder)
        if identity in above:
            out.loops.append(current_folder)
            continue
        for entry in entries:
            suffix = os.path.splitext(entry.name)[1].lower()
            if _is_broken(entry):
                out.broken.append(Path(entry.path))
            elif entry.is_dir():
                pending.append(
                    (Path(entry.path), os.path.join(below, entry.name), above | {identity})
                )
            elif suffix in SUFFIXES:
                images.append((below, entry.name))
            elif entry.is_file() and _is_pillow_image(entry.path, suffix, kinds):
                out.unread[suffix] += 1
    out.images = [
        f"{below.replace(os.sep, '/')}/{name}" if below else name for below, name in sorted(images)
    ]
    return out


def subfolders(root: Path) -> list[str]:
    """Return the names of the visible folders in a folder, sorted.

    Args:
        root: Folder to search.

    Raises:
        FczooError: A link is broken, or ``root`` cannot be read.
    """
    entries, _ = _entries(root)
    refuse_broken([Path(entry.path) for entry in entries if _is_broken(entry)])
    return sorted(entry.name for entry in entries if entry.is_dir())


def find_named(names: Iterable[str], allowed: tuple[str, ...]) -> list[str]:
    """Return the names that are in ``allowed``, regardless of case.

    Args:
        names: Names to search.
        allowed: Names in lower case, in the order of the result.
    """
    matches = [name for name in names if name.lower() in allowed]
    return sorted(matches, key=lambda name: allowed.index(name.lower()))


def has_images(folder: Path) -> bool:
    """Return whether image files are directly in the folder.

    Args:
        folder: Folder to search.
    """
    return count_images(folder) > 0


def count_images(folder: Path) -> int:
    """Count the image files directly in the folder.

    Args:
        folder: Folder to search.
    """
    names = (entry.name.lower() for entry in _entries(folder)[0] if not entry.is_dir())
    return sum(os.path.splitext(name)[1] in SUFFIXES for name in names)


def refuse_broken(links: list[Path]) -> None:
    """Raise FczooError for broken symbolic links.

    Args:
        links: Broken links.

    Raises:
        FczooError: ``links`` is not empty; the message names the first.
    """
    if links:
        first = min(links)
        count_note = f" ({len(links)} such links)" if len(links) > 1 else ""
        problem = f"broken symbolic link {first} -> {os.readlink(first)}{count_note}"
        raise FczooError(f"{problem}; restore its target, or remove the link")


def raw_name(name: str) -> bytes:
    """Return the bytes of a file name, whatever the locale.

    Args:
        name: Name as Python reads it, with surrogate escapes.
    """
    return name.encode("utf-8", "surrogateescape")


def normalise_name(name: str) -> str:
    """Return a file name in the Unicode form in which names are compared.

    macOS stores accents apart from their letters (NFD), other systems and most lists do not (NFC).

    Args:
        name: Name as Python reads it, with surrogate escapes.
    """
    return unicodedata.normalize("NFC", raw_name(name).decode("utf-8", "surrogateescape"))


def _entries(folder: Path) -> tuple[list["os.DirEntry[str]"], tuple[int, int]]:
    """Return the visible entries of a folder, and the folder's identity."""
    try:
        about = os.stat(folder)
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not _is_hidden(entry.name)], (
                about.st_dev,
                about.st_ino,
            )
    except FileNotFoundError:
        raise FczooError(
            f"no folder {folder}; see `fczoo show DATASET` for the expected layout"
        ) from None
    except OSError as error:
        raise FczooError(f"cannot read folder {folder}: {error.strerror}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def _is_broken(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


@cache
def _pillow_suffixes() -> frozenset[str]:
    """Return the suffixes of all image formats that Pillow reads."""
    Image.init()
    readers = Image.OPEN.keys() - STUBS
    return frozenset(
        suffix for suffix, kind in Image.registered_extensions().items() if kind in readers
    )


def _is_pillow_image(path: str, suffix: str, kinds: dict[str, bool]) -> bool:
    """Return whether a file is an image, by its suffix or, for an unknown one, by its content.

    ``kinds`` stores whether the first file with an unknown suffix is an image.
    """
    if suffix in _pillow_suffixes():
        return True
    if not suffix:
        return _can_open(path)
    if suffix not in kinds:
        kinds[suffix] = _can_open(path)
    return kinds[suffix]


def _can_open(path: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.open(path, formats=FORMATS).close()
        return True
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


MAX_LINE_CHARACTERS = 80  # characters of a wrong line in a message


def read_list(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, with or without byte order mark.

    Blank lines are skipped.

    Args:
        path: File to read.

    Raises:
        FczooError: The file is missing or of another encoding.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding"
        problem = (
            f"{path} is not UTF-8 text but {kind} (byte {content[error.start]:#04x} at "
            f"{error.start})"
        )
        raise FczooError(f"{problem}; save it as UTF-8") from None
    except OSError as error:
        raise FczooError(f"cannot read {path}: {error.strerror}") from error
    if "\0" in text:
        raise FczooError(f"{path} is not UTF-8 text but binary or UTF-16; save it as UTF-8")
    return [line for line in re.split(r"\r\n|\n|\r", text) if line.strip()]


def read_listed_images(path: Path, images: Iterable[str]) -> tuple[set[str], int]:
    """Return the images that a list names.

    ``\\`` separates folders as ``/`` does, ``./`` is dropped, and so is a number after the name,
    which other tools write as the label.

    Args:
        path: File of the list, one image per line.
        images: Names of the images below the folder of the list.

    Returns:
        The named images, and the number of those that are named more than once.

    Raises:
        FczooError: A line leaves the folder or names no image.
    """
    image_names = {normalise_name(name): name for name in images}
    count, unknown = Counter[str](), list[str]()
    for line in read_list(path):
        name = (
            normalise_name(line)
            if normalise_name(line) in image_names
            else normalise_path(line, path)
        )
        if name not in image_names and (label_match := re.fullmatch(r"(.+?)[\s,]+\d+", name)):
            name = label_match[1]
        if name in image_names:
            count[image_names[name]] += 1
        else:
            unknown.append(name)
    if unknown:
        problem = (
            f"{path} names {min(unknown)[:MAX_LINE_CHARACTERS]}, which is not in {path.parent}"
        )
        raise FczooError(f"{problem} ({len(unknown)} such lines){_hint(min(unknown), image_names)}")
    return set(count), sum(number > 1 for number in count.values())


def normalise_path(line: str, path: Path) -> str:
    """Return a path of a list in its plain form, with forward slashes.

    Args:
        line: Path in the list.
        path: File of the list.

    Raises:
        FczooError: The path is absolute or leaves the folder.
    """
    name = normalise_name(line.strip()).replace("\\", "/")
    if name.startswith("/") or re.match(r"[A-Za-z]:/", name) or ".." in name.split("/"):
        name = line.strip()[:MAX_LINE_CHARACTERS]
        problem = f"{path} names {name!r}, which may be outside of {path.parent}"
        raise FczooError(f"{problem}; name images as CLASS/FILE, below that folder")
    return posixpath.normpath(name)


def class_names(folders: Sequence[str], table: Path) -> tuple[str, ...]:
    """Return readable names of WordNet ids.

    A name is the first synonym, with the id if two classes share the name.

    Args:
        folders: WordNet ids; those that are not in the table do not change.
        table: Text file with ``ID NAME`` lines.
    """
    synonyms: dict[str, str] = {}
    if table.is_file():
        for line in table.read_text(encoding="utf-8-sig", errors="replace").splitlines():
            if match := re.match(r"(n\d{8})\s+([^,]+)", line):
                synonyms[match[1]] = match[2].strip().replace("_", " ")
    names = [synonyms.get(folder, folder) for folder in folders]
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    pairs = zip(names, folders, strict=True)
    return tuple(f"{name} ({folder})" if name in duplicates else name for name, folder in pairs)


def _hint(name: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown name for an error message."""
    if lookalike := next(
        (candidate for candidate in known if candidate.casefold() == name.casefold()), None
    ):
        return f"; did you mean {lookalike}? (upper and lower case must match)"
    if not name.isascii():
        return "; is the list in another encoding than UTF-8?"
    return "; name images as CLASS/FILE, one per line"
