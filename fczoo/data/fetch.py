"""Downloads: resumed where they ended, verified, unpacked, and moved into place when complete.

All work happens in a folder ``.fetch-NAME`` below the data root, which no data set reads and which
is removed when the fetch is done.
"""

import errno
import hashlib
import lzma
import os
import shutil
import stat
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from gzip import GzipFile
from http.client import HTTPException
from pathlib import Path, PurePosixPath, PureWindowsPath
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, url2pathname, urlopen

from filelock import FileLock, Timeout

from fczoo import __version__
from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import encode_json, home
from fczoo.core.registry import DATASETS
from fczoo.core.terminal import progress_bar
from fczoo.data.dataset import IN_PACKAGE, Archive, Dataset

TIMEOUT = 60  # seconds without an answer
SHORT_TIMEOUT = 5  # the same for a question before a download
MIRROR = "give another address: fczoo data fetch --mirror"
# bytes to which an archive without a published checksum may unpack
MAX_UNPACKED_BYTES = 100 * 10**9
MAX_UNPACK_RATIO = 100  # of unpacked to packed bytes for such an archive; images hardly shrink
MIN_UNPACK_LIMIT = 1 << 20  # unpacked bytes that need no ratio
BLOCK = 1 << 20  # bytes that are copied at once
# least bytes that a member counts, as a block of the disk: empty files add up too
MIN_MEMBER_BYTES = 4096
PLAIN_SUFFIXES = (".txt", ".mat", ".npz", "")  # suffixes of files that are stored as they come
ARCHIVE_ERRORS = (
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
MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS}


def fetch(name: str, root: Path | None = None, mirror: str | None = None) -> str:
    """Download a data set and return a message with its folder.

    Downloaded files are kept for the next call unless they are wrong.

    Args:
        name: Name of the data set.
        root: Data root below which the data set is stored. Default: ``data`` in ``home()``.
        mirror: Another address that has the same files by their names.

    Raises:
        FczooError: The data set cannot be downloaded automatically, or a download fails, is not the
            published file, or has a member that ``unpack`` rejects.
    """
    dataset: Dataset = DATASETS.get(name)()
    name, root = dataset.name, (root or home() / "data").expanduser()
    if not dataset.folder and hasattr(dataset, "select"):
        raise FczooError(f"{name} has several data sets; name one, see `fczoo show {name}`")
    if not dataset.folder:
        raise FczooError(f"{name} needs no download: {dataset.source or IN_PACKAGE}")
    folder = root / dataset.folder
    if folder.exists():
        return f"{folder} is already there; `fczoo data check {name}` verifies it"
    if not dataset.can_download:
        advice = f"get {dataset.source} and unpack it in {root} as {dataset.layout}; then run"
        raise FczooError(
            f"{name} cannot be downloaded automatically; {advice} `fczoo data check {name}`"
        )
    done = f"{name} is in {folder}; licence: {dataset.licence or 'not stated'}"
    if not dataset.archives:
        if mirror:
            problem = f"{name} comes from the Hugging Face hub, to which --mirror does not apply"
            raise FczooError(f"{problem}; set HF_ENDPOINT to the address of another hub")
        folder.parent.mkdir(parents=True, exist_ok=True)
        dataset.download(folder)
        return done
    top = root / Path(dataset.folder).parts[0]
    if top.exists():
        raise FczooError(
            f"{top} is there but has no {folder.relative_to(top)}; move it away and fetch again"
        )
    work = root / f".fetch-{name.replace(':', '-')}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{work}.lock", timeout=0):
            _fetch(dataset, top, work, mirror)
    except Timeout as error:
        raise FczooError(f"another fetch of {name} into {root} is running; wait for it") from error
    return done


def _fetch(dataset: Dataset, top: Path, work: Path, mirror: str | None) -> None:
    unpack_folder, record = work / "unpacked", []
    shutil.rmtree(unpack_folder, ignore_errors=True)
    for archive in dataset.archives:
        url = f"{mirror.rstrip('/')}/{file_name(archive.url)}" if mirror else archive.url
        record.append({"url": url, **download(url, work / file_name(archive.url), archive)})
    try:
        for archive in dataset.archives:
            file = work / file_name(archive.url)
            unpack(file, unpack_folder / archive.into, unpack_limit(file, archive))
        if not (unpack_folder / dataset.folder).is_dir():
            problem = f"the download of {dataset.name} does not contain the folder {dataset.folder}"
            raise FczooError(f"{problem}; {MIRROR}")
    except FczooError:
        shutil.rmtree(work)
        raise
    except OSError as error:
        shutil.rmtree(unpack_folder, ignore_errors=True)
        problem = f"cannot unpack in {work}: {error.strerror or type(error).__name__}"
        raise FczooError(
            f"{problem}; correct this and run the command again (the download is kept)"
        ) from error
    note = {"files": record, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    (unpack_folder / top.name / "fetched.json").write_text(encode_json(note, indent=1) + "\n")
    os.replace(unpack_folder / top.name, top)
    shutil.rmtree(work)


def file_name(url: str) -> str:
    """Return the last part of an address.

    Args:
        url: Address of a file.
    """
    return PurePosixPath(unquote(urlsplit(url).path)).name


def unpack_limit(file: Path, archive: Archive) -> int | None:
    """Return the bytes to which a download may unpack; None with a published checksum.

    Args:
        file: Downloaded file.
        archive: Its declaration.
    """
    if archive.md5 or archive.sha256:
        return None
    return min(MAX_UNPACKED_BYTES, max(MIN_UNPACK_LIMIT, MAX_UNPACK_RATIO * file.stat().st_size))


def download_bytes(dataset: Dataset) -> int | None:
    """Return the size of a data set's archives; request unknown sizes from the servers.

    Args:
        dataset: Data set with archives.

    Returns:
        The size in bytes; None if a server does not respond.
    """
    sizes = [archive.size or _served_size(archive.url) for archive in dataset.archives]
    return None if None in sizes or not sizes else sum(size or 0 for size in sizes)


def _served_size(url: str) -> int | None:
    """Fetch the size of a file from a server; None if it does not respond."""
    request = Request(url, headers={"User-Agent": f"fczoo/{__version__}"}, method="HEAD")
    try:
        with urlopen(request, timeout=SHORT_TIMEOUT) as response:
            length = response.headers.get("Content-Length") or ""
    except (OSError, HTTPException):
        return None
    return int(length) if length.isdecimal() else None


def download(url: str, file: Path, archive: Archive, advice: str = MIRROR) -> dict[str, Any]:
    """Download a file, resuming where an earlier download ended.

    No more than the known size is read.

    Args:
        url: Address of the file.
        file: File to write.
        archive: Expected size and checksums.
        advice: Another way to the file, for error messages.

    Returns:
        The size in ``bytes``, and the checksums.

    Raises:
        FczooError: The connection fails or ends early (what has arrived is kept), or the content
            has another size or checksum than ``archive`` (it is removed).
    """
    if file.exists() and not file.is_file():
        raise FczooError(f"{file} is not an ordinary file; remove it and run the command again")
    offset = file.stat().st_size if file.exists() else 0
    if not file.exists() or archive.size is None or offset < archive.size:
        _transfer(url, file, offset, archive.size, advice)
    size, digests = file.stat().st_size, _digests(file)
    if problem := _describe_difference(archive, size, digests):
        file.unlink()
        problem = f"the file from {url} is {problem} and was removed"
        raise FczooError(f"{problem}; run the command again, or {advice}")
    if not archive.md5 and not archive.sha256:
        print(
            f"{file.name}: no checksum is published; its sha256 is {digests['sha256']}",
            file=sys.stderr,
        )
    return {"bytes": size, **digests}


def _describe_difference(archive: Archive, size: int, digests: dict[str, str]) -> str:
    """Describe how a file differs from the published one; empty if it does not."""
    if archive.size is not None and size > archive.size:
        return f"longer than the expected {archive.size} bytes"
    if archive.size is not None and size < archive.size:
        return f"{size} bytes long, expected {archive.size}"
    for kind, checksum in (("md5", archive.md5), ("sha256", archive.sha256)):
        if checksum and digests[kind] != checksum:
            return f"not the published file ({kind.upper()} {digests[kind]}, expected {checksum})"
    return ""


def _transfer(url: str, file: Path, offset: int, size: int | None, advice: str) -> None:
    """Append the bytes of ``url`` after the first ``offset``, and at most one beyond ``size``."""
    address = urlsplit(url)
    if address.scheme == "file" and not Path(url2pathname(address.path)).is_file():
        raise FczooError(f"{url} is not an ordinary file; {advice}")
    headers = {"User-Agent": f"fczoo/{__version__}", "Accept-Encoding": "identity"}
    request = Request(url, headers={**headers, "Range": f"bytes={offset}-"} if offset else headers)
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            if not (response.headers.get("Content-Range") or "").startswith(f"bytes {offset}-"):
                offset = 0  # the server sends the whole file
            length = response.headers.get("Content-Length")
            total = None if length is None else offset + int(length)
            with (
                file.open("ab" if offset else "wb") as out,
                progress_bar(file.name, total, offset) as bar,
            ):
                # read1 returns what has arrived, so that a slow connection loses no block
                while block := response.read1(
                    BLOCK if size is None else min(BLOCK, size + 1 - out.tell())
                ):
                    out.write(block)
                    bar.update(len(block))
    except HTTPError as error:
        if error.code == 416 and offset:
            return  # nothing is left to send; the checks that follow tell whether that is right
        problem = f"{url} answers {error.code} {error.reason}"
        raise FczooError(f"{problem}; try later, or {advice}") from error
    except (URLError, HTTPException, TimeoutError, ConnectionError, SSLError) as error:
        reason = getattr(error, "reason", None) or error
        problem = f"the download of {url} failed: {reason}"
        raise FczooError(f"{problem}; run the command again to resume") from error
    except OSError as error:  # a full disk, or a line that is gone
        problem = (
            f"the download of {url} to {file} failed: {error.strerror or type(error).__name__}"
        )
        raise FczooError(f"{problem}; run the command again to resume") from error
    size_on_disk = file.stat().st_size
    exceeds_size = size is not None and size_on_disk > size
    if total is not None and size_on_disk < total and not exceeds_size:
        problem = f"the download of {url} ended after {size_on_disk} of {total} bytes"
        raise FczooError(f"{problem}; run the command again to resume")


def _digests(file: Path) -> dict[str, str]:
    sums = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            for digest in sums.values():
                digest.update(block)
    return {name: digest.hexdigest() for name, digest in sums.items()}


def unpack(file: Path, into: Path, limit: int | None = None) -> None:
    """Unpack a tar, zip or gz file into a folder, or copy a file of ``PLAIN_SUFFIXES`` there.

    Args:
        file: Archive, list or array.
        into: Folder, which is created.
        limit: Largest number of unpacked bytes. Default: no limit.

    Raises:
        FczooError: The archive is broken, holds more than ``limit``, or has members that are links
            or devices, lead out of the folder or have no name.
        OSError: This machine fails, for example because its disk is full.
    """
    into.mkdir(parents=True, exist_ok=True)
    count_bytes = _make_byte_counter(file, limit)
    try:
        if file.suffix in PLAIN_SUFFIXES:
            count_bytes(file.stat().st_size)
            shutil.copyfile(file, into / file.name)
        elif tarfile.is_tarfile(file):
            _untar(file, into, count_bytes)
        elif zipfile.is_zipfile(file):
            _unzip(file, into, count_bytes)
        elif file.suffix == ".gz":
            _gunzip(file, into, count_bytes)
        else:
            raise FczooError(f"{file.name} is not a tar, zip, gz or txt file")
    except ARCHIVE_ERRORS as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        reason = first_line(error)
        raise FczooError(
            f"cannot unpack {file.name}: {reason}; it was removed, fetch it again"
        ) from error


def _make_byte_counter(file: Path, limit: int | None) -> Callable[[int], None]:
    """Return a function that counts a member of an archive, or a part of one, before it is written.

    It raises FczooError once the members have more than ``limit`` bytes in all.
    """
    total_bytes = 0

    def count_bytes(size: int) -> None:
        nonlocal total_bytes
        total_bytes += size
        if limit is not None and total_bytes > limit:
            description = f"{file.name}, {file.stat().st_size} bytes"
            raise FczooError(f"{description}, unpacks to more than {limit}; nothing of it was kept")

    return count_bytes


def _untar(file: Path, into: Path, count_bytes: Callable[[int], None]) -> None:
    # Python before 3.11.4 has no data filter; _check_member has already rejected what it would
    # reject
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with (
        tarfile.open(file) as archive,
        progress_bar(f"{file.name}: unpacking", None, 0, "file") as bar,
    ):
        for member in archive:
            _check_member(file, member.name, member.isfile() or member.isdir())
            count_bytes(max(member.size, MIN_MEMBER_BYTES))
            archive.extract(member, into, set_attrs=False, **options)
            bar.update()


def _unzip(file: Path, into: Path, count_bytes: Callable[[int], None]) -> None:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        with progress_bar(f"{file.name}: unpacking", len(members), 0, "file") as bar:
            for member in members:
                kind = stat.S_IFMT(member.external_attr >> 16)
                _check_member(file, member.orig_filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
                count_bytes(max(member.file_size, MIN_MEMBER_BYTES))
                archive.extract(member, into)
                bar.update()


def _gunzip(file: Path, into: Path, count_bytes: Callable[[int], None]) -> None:
    with GzipFile(file) as archive, (into / file.stem).open("wb") as out:
        while block := archive.read(BLOCK):
            count_bytes(len(block))
            out.write(block)


def _check_member(file: Path, name: str, file_or_folder: bool) -> None:
    """Raise FczooError for a member that no data set's archive has.

    Even links inside the folder are rejected: known ways around tarfile's data filter need one.
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
