"""Decoded images on disk: one memory-mapped file of uint8 squares per list of files, made once.

The pixels are written under another name and moved into place, and the index is written after that:
a cache without its index is not used. A file lock, which the system releases when its process ends,
keeps two runs from writing the same cache. The index holds a checksum of every block of images to
detect changed pixels.
"""

import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, home, name_file_in_errors, write_json
from fczoo.core.terminal import is_terminal

FORMAT = "fczoo-images-2"
END_BYTES = 4096  # bytes at either end of a file that are hashed
# threads that read the ends: on a network file system each file takes a round trip
READER_THREADS = 8
FILES_PER_READ = 256  # files that one thread reads one after another
# images that are decoded ahead of the disk at most, so that fast cores cannot outrun it
DECODE_WINDOW = 1024
BLOCK = 1 << 24  # bytes of pixels, about, that share a checksum
VERIFY_LIMIT = 1 << 28  # bytes of pixels, about, that are verified when a cache is opened

Item = TypeVar("Item")
Fingerprint = tuple[int, int, int, int, str]


def cached_pixels(
    dataset: str,
    source: list[Any],
    images: Sequence[Item],
    size: int,
    preparation: str,
    prepare: Callable[[Item, int], np.ndarray],
    cache: Path | None = None,
) -> np.ndarray:
    """Map the decoded images from a cache, which is built if it is missing.

    A cache belongs to ``source``, ``size`` and ``preparation``. Up to ``VERIFY_LIMIT`` bytes are
    compared with their checksums: a small cache as a whole, random blocks of a large one.

    Args:
        dataset: Name of the data set.
        source: Identity of the images, which changes with their content; as JSON.
        images: Files, or rows of a table.
        size: Side of the squares in pixels.
        preparation: Description of what ``prepare`` does.
        prepare: Function from one of ``images`` and a size to decoded pixels.
        cache: Cache folder. Default: the user's, below ``home()``.

    Returns:
        Pixels, uint8 [N, size, size, 3].

    Raises:
        FczooError: The disk is too small or cannot be written, pixels have changed, or ``prepare``
            raises it.
    """
    digest = hashlib.sha256(encode_json([FORMAT, preparation, size, source]).encode()).hexdigest()
    folder = (cache or home() / "cache") / "images"
    file_name = re.sub(r"[^\w.-]", "_", dataset)
    stem = folder / f"{file_name}-{size}-{digest[:24]}"
    about = {
        "format": FORMAT,
        "dataset": dataset,
        "images": len(images),
        "size": size,
        "preparation": preparation,
        "sha256 of the list": digest,
    }
    checksums = _read_checksums(stem, about)
    if checksums is None:
        with _report_write_errors(folder), FileLock(f"{stem}.lock"):
            # another run may have built it while this one waited
            checksums = _read_checksums(stem, about)
            if checksums is None:
                checksums = _build(stem, images, size, prepare, dataset)
                timestamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                write_json(
                    Path(f"{stem}.json"),
                    {**about, "sha256 of blocks": checksums, "made": timestamp},
                )
    # copy-on-write: torch needs a writable array, and the file must never change
    pixels = np.memmap(f"{stem}.u8", np.uint8, "c", shape=(len(images), size, size, 3))
    _verify(stem, pixels, checksums)
    return pixels


@contextmanager
def _report_write_errors(folder: Path) -> Iterator[None]:
    """Create a folder, and report errors of writing inside the context.

    Raises:
        FczooError: Writing inside fails; the message names the folder and FCZOO_HOME.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        problem = f"cannot write decoded images to {folder}: {error.strerror or error}"
        advice = "free space there, or set FCZOO_HOME to a writable folder"
        raise FczooError(f"{problem}; {advice}") from error


def file_fingerprints(root: Path, files: Sequence[Path]) -> list[tuple[str, Fingerprint]]:
    """Return the name below ``root`` and the fingerprint of each file.

    Args:
        root: Folder below which the files are.
        files: Files to read.
    """

    def read(start: int) -> list[tuple[str, Fingerprint]]:
        part = files[start : start + FILES_PER_READ]
        return [(file.relative_to(root).as_posix(), fingerprint(file)) for file in part]

    with ThreadPoolExecutor(READER_THREADS) as pool:
        slices = pool.map(read, range(0, len(files), FILES_PER_READ))
        return [entry for part in slices for entry in part]


def fingerprint(file: Path) -> Fingerprint:
    """Return size, times of change, inode and a hash of the first and last ``END_BYTES`` bytes.

    Two data sets may have equal names, sizes and times. A copied file has another inode and is
    decoded again.

    Args:
        file: File to read.
    """
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        with name_file_in_errors(file):
            about = os.fstat(handle)
            ends = os.read(handle, END_BYTES)
            if about.st_size > END_BYTES:
                os.lseek(handle, max(END_BYTES, about.st_size - END_BYTES), os.SEEK_SET)
                ends += os.read(handle, END_BYTES)
    finally:
        os.close(handle)
    digest = hashlib.sha256(ends).hexdigest()[:32]
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, digest


def _read_checksums(stem: Path, about: dict[str, Any]) -> list[str] | None:
    """Read the blocks' checksums.

    Returns None unless the index belongs to ``about`` and to pixels of the right length.
    """
    images, size = about["images"], about["size"]
    try:
        index = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        length = Path(f"{stem}.u8").stat().st_size
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(index, dict) or {k: index.get(k) for k in about} != about:
        return None
    checksums = index.get("sha256 of blocks")
    if not isinstance(checksums, list) or len(checksums) != math.ceil(
        images / _images_per_block(size)
    ):
        return None
    return checksums if length == images * _image_bytes(size) else None


def _image_bytes(size: int) -> int:
    return size * size * 3


def _images_per_block(size: int) -> int:
    return max(1, BLOCK // _image_bytes(size))


def _verify(stem: Path, pixels: np.ndarray, checksums: list[str]) -> None:
    """Compare some blocks with their checksums.

    Raises:
        FczooError: A block differs.
    """
    per_block = _images_per_block(pixels.shape[1])
    max_blocks = max(1, VERIFY_LIMIT // (per_block * _image_bytes(pixels.shape[1])))
    blocks: Sequence[int] = range(len(checksums))
    if len(checksums) > max_blocks:
        # a generator that no result depends on
        blocks = random.SystemRandom().sample(blocks, max_blocks)
    for block in blocks:
        digest = hashlib.sha256(
            pixels[block * per_block : (block + 1) * per_block].data
        ).hexdigest()
        if digest != checksums[block]:
            problem = f"the pixels in {stem}.u8 have changed since they were decoded"
            raise FczooError(f"{problem}; delete that file to decode the images again")


def _build(
    stem: Path,
    images: Sequence[Item],
    size: int,
    prepare: Callable[[Item, int], np.ndarray],
    dataset: str,
) -> list[str]:
    """Write the pixels and return the blocks' checksums.

    All cores decode, in threads: Pillow works outside Python's lock, and processes would import the
    user's script.
    """
    byte_count, free_bytes = len(images) * _image_bytes(size), shutil.disk_usage(stem.parent).free
    if byte_count > free_bytes:
        gigabytes = byte_count / 1e9
        problem = f"{len(images)} images at {size} pixels need {gigabytes:.1f} GB in {stem.parent}"
        advice = "free space, set FCZOO_HOME, or lower --stored-size or --train-per-class"
        raise FczooError(f"{problem}, which has {free_bytes / 1e9:.1f} GB free; {advice}")
    draft, cores, per_block = (
        stem.with_name(f"{stem.name}.u8.tmp"),
        os.cpu_count() or 1,
        _images_per_block(size),
    )
    digests, written = [], 0
    bar = tqdm(
        total=len(images),
        desc=f"{dataset}: decoding to {size}x{size}",
        unit="image",
        disable=not is_terminal(sys.stderr),
        leave=False,
    )
    if bar.disable:
        work = f"decoding {len(images)} images to {size}x{size}, once"
        print(
            f"{dataset}: {work}, {byte_count / 1e6:.0f} MB in {stem.parent}",
            file=sys.stderr,
            flush=True,
        )
    try:
        with bar, ThreadPoolExecutor(cores) as pool, draft.open("wb") as file:
            for start in range(0, len(images), DECODE_WINDOW):
                for pixels in pool.map(
                    lambda image: prepare(image, size), images[start : start + DECODE_WINDOW]
                ):
                    content = pixels.tobytes()
                    if written % per_block == 0:
                        digests.append(hashlib.sha256())
                    digests[-1].update(content)
                    file.write(content)
                    written += 1
                    bar.update()
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, f"{stem}.u8")
    finally:
        draft.unlink(missing_ok=True)
    return [digest.hexdigest() for digest in digests]
