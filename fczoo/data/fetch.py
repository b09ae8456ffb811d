"""Downloads: resumed where they broke off, verified before they are unpacked, unpacked beside and then moved into place.

Everything happens in a folder ``.fetch-NAME`` below the data root, which no data set reads; it goes when
the fetch is done.
"""

import errno
import hashlib
import json
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
from gzip import GzipFile
from http.client import HTTPException
from pathlib import Path, PurePosixPath, PureWindowsPath
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout
from tqdm import tqdm

from fczoo import __version__
from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive, Dataset

BLOCK = 1 << 20  # bytes
PATIENCE = 60  # seconds without an answer
BROKEN = (
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
DISK = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
}  # this machine's faults, not the archive's


def fetch(name: str, root: Path | None = None, mirror: str | None = None) -> str:
    """Download a data set below ``root`` and say where it is. ``mirror`` is another address that has the files by their names.

    Raises FczooError where it may not be downloaded, and when a download breaks off, is not what it
    should be, or holds what no archive should. What was downloaded is kept for the next call unless it is
    wrong.
    """
    dataset: Dataset = DATASETS.get(name)()
    root = (root or home() / "data").expanduser()
    if not dataset.folder:
        raise FczooError(f"{name} needs no download: {dataset.source or 'it comes with its package'}")
    place = root / dataset.folder
    if place.exists():
        return f"{place} is already there; `fczoo data check {name}` verifies it"
    if not dataset.archives:
        where = f"get {dataset.source} and unpack it in {root} as {dataset.layout}"
        raise FczooError(
            f"{name} cannot be downloaded automatically; {where}; then run `fczoo data check {name}`"
        )
    top = root / Path(dataset.folder).parts[0]
    if top.exists():
        raise FczooError(f"{top} is there but has no {place.relative_to(top)}; move it away and fetch again")
    work = root / f".fetch-{name}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / f".fetch-{name}.lock", timeout=0):
            _fetch(dataset, top, work, mirror)
    except Timeout as error:
        raise FczooError(f"another fetch of {name} into {root} is running; wait for it") from error
    return f"{name} is in {place}; licence: {dataset.licence or 'not stated'}"


def _fetch(dataset: Dataset, top: Path, work: Path, mirror: str | None) -> None:
    fresh, about = work / "unpacked", []
    shutil.rmtree(fresh, ignore_errors=True)
    for archive in dataset.archives:
        url = f"{mirror.rstrip('/')}/{file_name(archive.url)}" if mirror else archive.url
        about.append({"url": url, **download(url, work / file_name(archive.url), archive)})
    try:
        for archive in dataset.archives:
            unpack(work / file_name(archive.url), fresh / archive.into)
        if not (fresh / dataset.folder).is_dir():
            raise FczooError(f"what was downloaded for {dataset.name} holds no folder {dataset.folder}")
    except FczooError:
        shutil.rmtree(work)
        raise
    note = {"files": about, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    (fresh / top.name / "fetched.json").write_text(json.dumps(note, indent=1) + "\n")
    os.replace(fresh / top.name, top)
    shutil.rmtree(work)


def file_name(url: str) -> str:
    """Last part of an address."""
    return PurePosixPath(unquote(urlsplit(url).path)).name


def download(url: str, file: Path, archive: Archive) -> dict[str, Any]:
    """Get ``url`` as ``file``, going on from what is there of it; returns its size and checksums.

    Raises FczooError for a connection that fails or ends early (what has arrived is kept) and for content
    with another size or checksum than ``archive`` says (it is removed).
    """
    done = file.stat().st_size if file.exists() else 0
    if not file.exists() or archive.size is None or done < archive.size:
        _transfer(url, file, done)
    size, digests, wrong = file.stat().st_size, _digests(file), ""
    if archive.size is not None and size != archive.size:
        wrong = f"{size} bytes long, expected {archive.size}"
    elif archive.md5 and digests["md5"] != archive.md5:
        wrong = f"not the published file (MD5 {digests['md5']}, expected {archive.md5})"
    if wrong:
        file.unlink()
        raise FczooError(
            f"what came from {url} is {wrong}; it was removed, run it again or give another address with --mirror"
        )
    if not archive.md5:
        print(f"{file.name}: nobody publishes a checksum; its sha256 is {digests['sha256']}", file=sys.stderr)
    return {"bytes": size, **digests}


def _transfer(url: str, file: Path, done: int) -> None:
    headers = {"User-Agent": f"fczoo/{__version__}", "Accept-Encoding": "identity"}
    request = Request(url, headers={**headers, "Range": f"bytes={done}-"} if done else headers)
    try:
        with urlopen(request, timeout=PATIENCE) as answer:
            if not (answer.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
                done = 0  # the server sends the whole file
            length = answer.headers.get("Content-Length")
            total = None if length is None else done + int(length)
            with file.open("ab" if done else "wb") as out, _bar(file.name, total, done) as bar:
                while block := answer.read1(
                    BLOCK
                ):  # whatever is there: a slow line is no reason to lose a block
                    out.write(block)
                    bar.update(len(block))
    except HTTPError as error:
        if (
            error.code == 416 and done
        ):  # nothing is left to send; the checks that follow tell whether that is right
            return
        raise FczooError(
            f"{url} answers {error.code} {error.reason}; try later, or get the file elsewhere and give --mirror"
        ) from error
    except (URLError, HTTPException, TimeoutError, ConnectionError, SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise FczooError(
            f"the download of {url} failed: {reason}; run it again, what has arrived is kept"
        ) from error
    have = file.stat().st_size
    if total is not None and have < total:
        raise FczooError(
            f"the download of {url} ended after {have} of {total} bytes; run it again, it goes on from there"
        )


def _digests(file: Path) -> dict[str, str]:
    sums = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            for one in sums.values():
                one.update(block)
    return {name: one.hexdigest() for name, one in sums.items()}


def unpack(file: Path, into: Path) -> None:
    """Unpack a tar, zip or gz file. Raises FczooError for a broken one, and for links, devices and paths that lead elsewhere."""
    into.mkdir(parents=True, exist_ok=True)
    try:
        if tarfile.is_tarfile(file):
            _untar(file, into)
        elif zipfile.is_zipfile(file):
            _unzip(file, into)
        elif file.suffix == ".gz":
            with GzipFile(file) as packed, (into / file.stem).open("wb") as out:
                shutil.copyfileobj(packed, out, BLOCK)
        else:
            raise FczooError(f"{file.name} is no tar, zip or gz file")
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        raise FczooError(
            f"cannot unpack {file.name}: {first_line(error)}; it was removed, fetch it again"
        ) from error


def _untar(file: Path, into: Path) -> None:
    with tarfile.open(file) as packed, _bar(f"{file.name}: unpacking", None, 0, "file") as bar:
        for member in packed:
            _check(file, member.name, member.isfile() or member.isdir())
            place = into / member.name
            if content := packed.extractfile(
                member
            ):  # written here, as early Python 3.11 extracts only with the archive's modes and owners
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as out:
                    shutil.copyfileobj(content, out, BLOCK)
            else:
                place.mkdir(parents=True, exist_ok=True)
            bar.update()


def _unzip(file: Path, into: Path) -> None:
    with (
        zipfile.ZipFile(file) as packed,
        _bar(f"{file.name}: unpacking", len(packed.infolist()), 0, "file") as bar,
    ):
        for member in packed.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            _check(file, member.orig_filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
            packed.extract(member, into)
            bar.update()


def _check(file: Path, name: str, plain: bool) -> None:
    path = PureWindowsPath(name)  # takes both kinds of slashes, and knows drives
    if not plain:
        raise FczooError(
            f"{file.name} holds {name!r}, which is neither a file nor a folder; nothing of it was kept"
        )
    if path.anchor or ".." in path.parts or "\0" in name:
        raise FczooError(f"{file.name} holds {name!r}, which leads out of the folder; nothing of it was kept")


def _bar(label: str, total: int | None, done: int, unit: str = "B") -> tqdm:
    quiet = not sys.stderr.isatty()
    if quiet:
        print(f"{label}: {'resumed' if done else 'started'}", file=sys.stderr, flush=True)
    scaled = unit == "B"
    return tqdm(
        total=total,
        initial=done,
        desc=label,
        unit=unit,
        unit_scale=scaled,
        unit_divisor=1000,
        disable=quiet,
        leave=False,
    )
