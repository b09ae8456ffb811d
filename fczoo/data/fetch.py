"""Downloads: resumed where they broke off, verified before they are unpacked, moved into place when whole.

All work happens in a folder ``.fetch-NAME`` below the data root, which no data set reads and which is
removed when the fetch is done.
"""

import hashlib
import os
import shutil
import sys
import time
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, url2pathname, urlopen

from filelock import FileLock, Timeout

from fczoo import __version__
from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, home
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive, Dataset
from fczoo.data.unpack import BLOCK, progress_bar, unpack

PATIENCE = 60  # seconds without an answer
LARGEST_DATA_SET = 100 * 10**9  # bytes to which an archive without a published checksum may unpack
LARGEST_RATIO = 100  # of unpacked to packed bytes for such an archive; images hardly shrink
ALWAYS_ALLOWED = 1 << 20  # unpacked bytes that need no ratio


def fetch(name: str, root: Path | None = None, mirror: str | None = None) -> str:
    """Download a data set below ``root`` and say where it is.

    ``mirror`` is another address that has the same files by their names. Raises FczooError where the data
    set may not be downloaded, and when a download breaks off, is not the published file, or holds what no
    archive should. What was downloaded is kept for the next call unless it is wrong.
    """
    dataset: Dataset = DATASETS.get(name)()
    name, root = dataset.name, (root or home() / "data").expanduser()
    if not dataset.folder:
        raise FczooError(f"{name} needs no download: {dataset.source or 'it comes with its package'}")
    folder = root / dataset.folder
    if folder.exists():
        return f"{folder} is already there; `fczoo data check {name}` verifies it"
    if not dataset.archives:
        advice = f"get {dataset.source} and unpack it in {root} as {dataset.layout}; then run"
        raise FczooError(f"{name} cannot be downloaded automatically; {advice} `fczoo data check {name}`")
    top = root / Path(dataset.folder).parts[0]
    if top.exists():
        raise FczooError(f"{top} is there but has no {folder.relative_to(top)}; move it away and fetch again")
    work = root / f".fetch-{name}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / f".fetch-{name}.lock", timeout=0):
            _fetch(dataset, top, work, mirror)
    except Timeout as error:
        raise FczooError(f"another fetch of {name} into {root} is running; wait for it") from error
    return f"{name} is in {folder}; licence: {dataset.licence or 'not stated'}"


def _fetch(dataset: Dataset, top: Path, work: Path, mirror: str | None) -> None:
    unpacked, record = work / "unpacked", []
    shutil.rmtree(unpacked, ignore_errors=True)
    for archive in dataset.archives:
        url = f"{mirror.rstrip('/')}/{file_name(archive.url)}" if mirror else archive.url
        record.append({"url": url, **download(url, work / file_name(archive.url), archive)})
    try:
        for archive in dataset.archives:
            file = work / file_name(archive.url)
            unpack(file, unpacked / archive.into, unpack_limit(file, archive))
        if not (unpacked / dataset.folder).is_dir():
            raise FczooError(f"what was downloaded for {dataset.name} holds no folder {dataset.folder}")
    except FczooError:
        shutil.rmtree(work)
        raise
    except OSError as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        problem = f"cannot unpack in {work}: {error.strerror or type(error).__name__}"
        raise FczooError(f"{problem}; mend that and run it again, the download is kept") from error
    note = {"files": record, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    (unpacked / top.name / "fetched.json").write_text(encode_json(note, indent=1) + "\n")
    os.replace(unpacked / top.name, top)
    shutil.rmtree(work)


def file_name(url: str) -> str:
    """Last part of an address."""
    return PurePosixPath(unquote(urlsplit(url).path)).name


def unpack_limit(file: Path, archive: Archive) -> int | None:
    """Bytes to which a download may unpack; None where a published checksum vouches for it."""
    if archive.md5 or archive.sha256:
        return None
    return min(LARGEST_DATA_SET, max(ALWAYS_ALLOWED, LARGEST_RATIO * file.stat().st_size))


def download(url: str, file: Path, archive: Archive) -> dict[str, Any]:
    """Get ``url`` as ``file``, going on from what is there of it; returns its size, bytes, and checksums.

    Raises FczooError for a connection that fails or ends early (what has arrived is kept) and for content
    with another size or checksum than ``archive`` says (it is removed). No more than the known size is
    read.
    """
    if file.exists() and not file.is_file():
        raise FczooError(f"{file} is no ordinary file; remove it and run it again")
    done = file.stat().st_size if file.exists() else 0
    if not file.exists() or archive.size is None or done < archive.size:
        _transfer(url, file, done, archive.size)
    size, digests = file.stat().st_size, _digests(file)
    if problem := _difference(archive, size, digests):
        file.unlink()
        advice = "it was removed, run it again or give another address with --mirror"
        raise FczooError(f"what came from {url} is {problem}; {advice}")
    if not archive.md5 and not archive.sha256:
        print(f"{file.name}: nobody publishes a checksum; its sha256 is {digests['sha256']}", file=sys.stderr)
    return {"bytes": size, **digests}


def _difference(archive: Archive, size: int, digests: dict[str, str]) -> str:
    """How a file differs from the published one, in words; empty where it does not."""
    if archive.size is not None and size > archive.size:
        return f"longer than the expected {archive.size} bytes"
    if archive.size is not None and size < archive.size:
        return f"{size} bytes long, expected {archive.size}"
    for kind, expected in (("md5", archive.md5), ("sha256", archive.sha256)):
        if expected and digests[kind] != expected:
            return f"not the published file ({kind.upper()} {digests[kind]}, expected {expected})"
    return ""


def _transfer(url: str, file: Path, done: int, size: int | None) -> None:
    """Append what ``url`` has beyond the first ``done`` bytes, and one byte at most beyond ``size``."""
    address = urlsplit(url)
    if address.scheme == "file" and not Path(url2pathname(address.path)).is_file():
        raise FczooError(f"{url} is no ordinary file; give another address with --mirror")
    headers = {"User-Agent": f"fczoo/{__version__}", "Accept-Encoding": "identity"}
    request = Request(url, headers={**headers, "Range": f"bytes={done}-"} if done else headers)
    try:
        with urlopen(request, timeout=PATIENCE) as answer:
            if not (answer.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
                done = 0  # the server sends the whole file
            length = answer.headers.get("Content-Length")
            total = None if length is None else done + int(length)
            with file.open("ab" if done else "wb") as out, progress_bar(file.name, total, done) as bar:
                # read1 gives what has arrived: a slow line is no reason to lose a block
                while block := answer.read1(BLOCK if size is None else min(BLOCK, size + 1 - out.tell())):
                    out.write(block)
                    bar.update(len(block))
    except HTTPError as error:
        if error.code == 416 and done:
            return  # nothing is left to send; the checks that follow tell whether that is right
        answered = f"{url} answers {error.code} {error.reason}"
        raise FczooError(f"{answered}; try later, or get the file elsewhere and give --mirror") from error
    except (URLError, HTTPException, TimeoutError, ConnectionError, SSLError) as error:
        reason = getattr(error, "reason", None) or error
        problem = f"the download of {url} failed: {reason}"
        raise FczooError(f"{problem}; run it again, what has arrived is kept") from error
    have = file.stat().st_size
    stopped = size is not None and have > size
    if total is not None and have < total and not stopped:
        problem = f"the download of {url} ended after {have} of {total} bytes"
        raise FczooError(f"{problem}; run it again, it goes on from there")


def _digests(file: Path) -> dict[str, str]:
    sums = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            for digest in sums.values():
                digest.update(block)
    return {name: digest.hexdigest() for name, digest in sums.items()}
