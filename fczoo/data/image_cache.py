"""Decoded images on disk: one file of uint8 squares a list of files, memory-mapped, made once.

The pixels are written under another name and moved into place, and the index is written after that: a
cache without its index does not exist. A lock that the system drops with its process keeps two runs from
writing the same one.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from fczoo.core.errors import FczooError
from fczoo.core.files import home

FORMAT = "fczoo-images-1"
WINDOW = (
    1024  # images that are decoded before the next are begun, so that fast cores cannot outrun a slow disk
)


def cached_pixels(
    dataset: str,
    root: Path,
    files: Sequence[Path],
    size: int,
    preparation: str,
    prepare: Callable[[Path, int], np.ndarray],
) -> np.ndarray:
    """The images as uint8 [N, size, size, 3], mapped from the cache below ``home()``, where they are put first if need be.

    ``prepare(path, size)`` decodes one. A cache belongs to the files' names below ``root``, sizes and
    times of change, to ``size`` and to ``preparation``. Raises FczooError when the disk is too small, and
    whatever ``prepare`` raises.
    """
    source = _source(root, files)
    digest = hashlib.sha256(json.dumps([FORMAT, preparation, size, source]).encode()).hexdigest()
    folder = home() / "cache" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{dataset}-{size}-{digest[:24]}"
    about = {
        "format": FORMAT,
        "dataset": dataset,
        "images": len(files),
        "size": size,
        "preparation": preparation,
        "sha256 of the list": digest,
    }
    if not _whole(stem, about):
        with FileLock(f"{stem}.lock"):
            if not _whole(stem, about):  # another run may have made it while this one waited
                _build(stem, files, size, prepare, dataset)
                draft = stem.with_name(f"{stem.name}.json.tmp")
                draft.write_text(
                    json.dumps({**about, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n"
                )
                os.replace(draft, f"{stem}.json")
    # copy-on-write: torch wants arrays that may be written to, and the file must never be
    return np.memmap(f"{stem}.u8", np.uint8, "c", shape=(len(files), size, size, 3))


def _source(root: Path, files: Sequence[Path]) -> list[tuple[str, int, int]]:
    out = []
    for file in files:
        stat = file.stat()
        out.append((file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns))
    return out


def _whole(stem: Path, about: dict) -> bool:
    """Whether the index is there and belongs to pixels of the right length."""
    try:
        index = json.loads(Path(f"{stem}.json").read_text())
        length = Path(f"{stem}.u8").stat().st_size
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(index, dict)
        and {k: index.get(k) for k in about} == about
        and length == _bytes(about["images"], about["size"])
    )


def _bytes(images: int, size: int) -> int:
    return images * size * size * 3


def _build(
    stem: Path, files: Sequence[Path], size: int, prepare: Callable[[Path, int], np.ndarray], dataset: str
) -> None:
    """Decode on all cores, in threads: Pillow works outside Python's lock, and processes would import the user's script."""
    need, free = _bytes(len(files), size), shutil.disk_usage(stem.parent).free
    if need > free:
        raise FczooError(
            f"{len(files)} images at {size} pixels need {need / 1e9:.1f} GB in {stem.parent}, which has {free / 1e9:.1f}; "
            "free some, set FCZOO_HOME, or take --stored-size or --train-per-class smaller"
        )
    draft, cores = stem.with_name(f"{stem.name}.u8.tmp"), os.cpu_count() or 1
    bar = tqdm(
        total=len(files),
        desc=f"{dataset}: decoding to {size}x{size}",
        unit="image",
        disable=not sys.stderr.isatty(),
        leave=False,
    )
    if bar.disable:
        print(
            f"{dataset}: decoding {len(files)} images to {size}x{size}, once, {need / 1e6:.0f} MB in {stem.parent}",
            file=sys.stderr,
            flush=True,
        )
    try:
        with bar, ThreadPoolExecutor(cores) as pool, draft.open("wb") as file:
            for start in range(0, len(files), WINDOW):
                for pixels in pool.map(lambda path: prepare(path, size), files[start : start + WINDOW]):
                    file.write(pixels.tobytes())
                    bar.update()
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, f"{stem}.u8")
    finally:
        draft.unlink(missing_ok=True)
