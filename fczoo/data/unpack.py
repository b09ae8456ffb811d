"""Archives unpacked with care: nothing outside of the folder, no links, no more than was agreed."""

import errno
import lzma
import shutil
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from gzip import GzipFile
from pathlib import Path, PureWindowsPath
from typing import Any

from tqdm import tqdm

from fczoo.core.errors import FczooError, first_line
from fczoo.core.streams import is_terminal

BLOCK = 1 << 20  # bytes that are copied at once
# bytes that a member counts at least, as a block of the disk: empty files add up too
SMALLEST = 4096
BROKEN_ARCHIVE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ValueError,
    RuntimeError,
    OSError,
)
MACHINE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS}


def unpack(file: Path, into: Path, limit: int | None = None) -> None:
    """Unpack a tar, zip or gz file into a folder, or copy a txt file there.

    Args:
        file: Archive or text file.
        into: Folder, which is created.
        limit: Largest number of unpacked bytes. Default: no limit.

    Raises:
        FczooError: The archive is broken, holds more than ``limit``, or has members that are links
            or devices, lead out of the folder or have no name.
        OSError: This machine fails, for example because its disk is full.
    """
    into.mkdir(parents=True, exist_ok=True)
    budget = _Budget(file, limit)
    try:
        if tarfile.is_tarfile(file):
            _untar(file, into, budget)
        elif zipfile.is_zipfile(file):
            _unzip(file, into, budget)
        elif file.suffix == ".gz":
            _gunzip(file, into, budget)
        elif file.suffix == ".txt":
            budget.spend(file.stat().st_size)
            shutil.copyfile(file, into / file.name)
        else:
            raise FczooError(f"{file.name} is not a tar, zip, gz or txt file")
    except BROKEN_ARCHIVE as error:
        if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
            raise
        reason = first_line(error)
        raise FczooError(
            f"cannot unpack {file.name}: {reason}; it was removed, fetch it again"
        ) from error


class _Budget:
    """The bytes that an archive may still unpack to."""

    def __init__(self, file: Path, limit: int | None):
        self.file, self.limit, self.spent = file, limit, 0

    def spend(self, size: int) -> None:
        """Count a member, or a part of one, before it is written.

        Raises:
            FczooError: It is too much.
        """
        self.spent += size
        if self.limit is not None and self.spent > self.limit:
            description = f"{self.file.name}, {self.file.stat().st_size} bytes"
            raise FczooError(
                f"{description}, unpacks to more than {self.limit}; nothing of it was kept"
            )


def _untar(file: Path, into: Path, budget: _Budget) -> None:
    # Python before 3.11.4 has no data filter; what it would refuse is refused by _check_member
    # before
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with (
        tarfile.open(file) as archive,
        progress_bar(f"{file.name}: unpacking", None, 0, "file") as bar,
    ):
        for member in archive:
            _check_member(file, member.name, member.isfile() or member.isdir())
            budget.spend(max(member.size, SMALLEST))
            archive.extract(member, into, set_attrs=False, **options)
            bar.update()


def _unzip(file: Path, into: Path, budget: _Budget) -> None:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        with progress_bar(f"{file.name}: unpacking", len(members), 0, "file") as bar:
            for member in members:
                kind = stat.S_IFMT(member.external_attr >> 16)
                _check_member(file, member.orig_filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
                budget.spend(max(member.file_size, SMALLEST))
                archive.extract(member, into)
                bar.update()


def _gunzip(file: Path, into: Path, budget: _Budget) -> None:
    with GzipFile(file) as archive, (into / file.stem).open("wb") as out:
        while block := archive.read(BLOCK):
            budget.spend(len(block))
            out.write(block)


def _check_member(file: Path, name: str, file_or_folder: bool) -> None:
    """Refuse what no data set's archive holds.

    Links are refused even inside the folder: the known ways around tarfile's data filter need one.
    """
    path = PureWindowsPath(name)  # takes both kinds of slashes, and knows drives
    if not name:
        raise FczooError(f"{file.name} holds a member without a name; nothing of it was kept")
    if not file_or_folder:
        problem = "is neither a file nor a folder"
    elif path.anchor or ".." in path.parts or "\0" in name:
        problem = "leads out of the folder"
    else:
        return
    raise FczooError(f"{file.name} holds {name!r}, which {problem}; nothing of it was kept")


def progress_bar(label: str, total: int | None, done: int, unit: str = "B") -> "tqdm[Any]":
    """Create a progress bar on a terminal; elsewhere print one line at the start.

    Args:
        label: Text in front of the bar.
        total: Units at the end, where known.
        done: Units at the start.
        unit: Name of the unit; B for bytes.
    """
    quiet = not is_terminal(sys.stderr)
    if quiet:
        print(f"{label}: {'resumed' if done else 'started'}", file=sys.stderr, flush=True)
    return tqdm(
        total=total,
        initial=done,
        desc=label,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1000,
        disable=quiet,
        leave=False,
    )
