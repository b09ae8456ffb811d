"""Text files next to images: lists of files, labels and classes, one entry per line."""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.data.folder_scan import comparable

SHOWN = 80  # characters of a wrong line in a message


def read_list(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, with or without byte order mark; blank lines are skipped.

    Raises FczooError for a missing file and for another encoding.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding"
        problem = f"{path} is not UTF-8 text but {kind} (byte {content[error.start]:#04x} at {error.start})"
        raise FczooError(f"{problem}; save it as UTF-8") from None
    except OSError as error:
        raise FczooError(f"cannot read {path}: {error.strerror}") from error
    if "\0" in text:
        raise FczooError(f"{path} is not UTF-8 text but binary or UTF-16; save it as UTF-8")
    return [line for line in re.split(r"\r\n|\n|\r", text) if line.strip()]


def listed_images(path: Path, images: Iterable[str]) -> set[str]:
    """Return those of the ``images``, named below the folder of the list, that its lines name.

    ``\\`` separates folders as ``/`` does, ``./`` is dropped, and an image may be named twice.
    Raises FczooError for a line that leaves the folder or names no image.
    """
    known = {comparable(name): name for name in images}
    found, unknown = set[str](), list[str]()
    for line in read_list(path):
        name = comparable(line) if comparable(line) in known else inside(line, path)
        if name in known:
            found.add(known[name])
        else:
            unknown.append(name)
    if unknown:
        problem = f"{path} names {min(unknown)[:SHOWN]}, which is not in {path.parent}"
        raise FczooError(f"{problem} ({len(unknown)} such lines){_hint(min(unknown), known)}")
    return found


def inside(line: str, path: Path) -> str:
    """Return a path of the list ``path`` in its plain form, with forward slashes.

    Raises FczooError for an absolute path and for one that leaves the folder.
    """
    name = comparable(line.strip()).replace("\\", "/")
    if name.startswith("/") or re.match(r"[A-Za-z]:/", name) or ".." in name.split("/"):
        problem = f"{path} names {line.strip()[:SHOWN]!r}, which may lie outside of {path.parent}"
        raise FczooError(f"{problem}; name images as CLASS/FILE, below that folder")
    return posixpath.normpath(name)


def _hint(name: str, known: Iterable[str]) -> str:
    """Return what may be wrong with a name that is not known."""
    if near := next((other for other in known if other.casefold() == name.casefold()), None):
        return f"; {near} is there, mind the capitals"
    if not name.isascii():
        return "; is the list in another encoding than UTF-8?"
    return "; name images as CLASS/FILE, one per line"
