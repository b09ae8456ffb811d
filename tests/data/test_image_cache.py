"""Test the cache of decoded image files."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fczoo import FczooError
from fczoo.data import image_files
from fczoo.data.image_files import ImageFiles, prepare

pytestmark = pytest.mark.usefixtures("cache")
EVERY = np.arange(12)


def test_images_are_decoded_once(
    files: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = files.take(EVERY)
    assert isinstance(first.pixels, np.memmap)
    assert first.labels.tolist() == files.labels.tolist()
    for pixels, name in zip(first.pixels, files.names, strict=True):
        assert np.array_equal(pixels, prepare(files.root / name, 16))
    times = {p.name: p.stat().st_mtime_ns for p in cache.iterdir()}
    monkeypatch.setattr("fczoo.data.image_files.to_square", None)  # would fail
    assert np.array_equal(files.take(EVERY).pixels, first.pixels)
    assert {p.name: p.stat().st_mtime_ns for p in cache.iterdir()} == times


def test_subset_is_decoded_separately(files: ImageFiles, cache: Path) -> None:
    some = files.take(np.array([1, 5, 7]), 8)
    assert some.pixels.shape == (3, 8, 8, 3)
    assert some.labels.tolist() == [1, 2, 1]
    assert np.array_equal(some.pixels[1], prepare(files.root / files.names[5], 8))
    assert [p.stat().st_size for p in cache.glob("*.u8")] == [3 * 8 * 8 * 3]


@pytest.mark.parametrize("change", ["size", "file", "list", "preparation"])
def test_cache_depends_on_source_size_and_preparation(
    change: str, files: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.take(EVERY)
    index, size = EVERY, None
    if change == "size":
        size = 8
    elif change == "file":
        Image.new("RGB", (20, 16), (1, 2, 3)).save(files.root / files.names[4])
    elif change == "list":
        index = EVERY[1:]
    else:
        monkeypatch.setitem(image_files.PREPARATIONS, "crop", "another one")
    again = files.take(index, size)
    assert len(list(cache.glob("*.u8"))) == 2
    if change == "file":
        assert (again.pixels[4] == [1, 2, 3]).all()


@pytest.mark.parametrize("kind", ["bmp", "png"])
def test_changed_pixels_with_equal_metadata_are_decoded(
    kind: str, tmp_path: Path, cache: Path
) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root, grey in zip(roots, (10, 200), strict=True):
        root.mkdir()
        file = root / f"0.{kind}"
        Image.new("RGB", (8, 8), (grey, grey, grey)).save(file)
        file.write_bytes(file.read_bytes().ljust(20_000, b"."))
        os.utime(file, (0, 0))
    labels, one = np.zeros(1, np.int64), np.arange(1)
    for root, grey in zip(roots, (10, 200), strict=True):
        if root != roots[0]:
            shutil.rmtree(roots[0])
            root.rename(roots[0])
        pixels = ImageFiles("toy", roots[0], (f"0.{kind}",), labels, 8).take(one).pixels
        assert (pixels == grey).all()


def test_full_disk_and_unwritable_folder_are_reported(
    files: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FczooError, match=rf"to {cache}: No space left on device; .* FCZOO_HOME"):
        files.take(EVERY)
    monkeypatch.setenv("FCZOO_HOME", str(files.root / files.names[0]))
    with pytest.raises(FczooError, match=r"cannot write decoded images to .* set FCZOO_HOME"):
        files.take(EVERY)


def test_array_changes_do_not_reach_cache(files: ImageFiles) -> None:
    pixels = files.take(EVERY).pixels
    copy = pixels.copy()
    pixels[:] = 0
    assert np.array_equal(files.take(EVERY).pixels, copy)


def test_corrupt_image_leaves_no_cache(files: ImageFiles, cache: Path) -> None:
    broken = files.root / files.names[7]
    content = broken.read_bytes()
    broken.write_bytes(content[:100])
    with pytest.raises(FczooError, match=rf"cannot read image {broken}: .*fczoo data check toy"):
        files.take(EVERY)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]
    broken.write_bytes(content)
    assert len(files.take(EVERY).pixels) == 12


@pytest.mark.parametrize("harm", ["no index", "torn index", "short pixels", "other index"])
def test_incomplete_cache_is_rebuilt(harm: str, files: ImageFiles, cache: Path) -> None:
    reference = files.take(EVERY).pixels.copy()
    index, pixels = next(cache.glob("*.json")), next(cache.glob("*.u8"))
    if harm == "no index":
        index.unlink()
    elif harm == "torn index":
        index.write_text(index.read_text()[:40])
    elif harm == "short pixels":
        pixels.write_bytes(pixels.read_bytes()[:-1])
    else:
        index.write_text(json.dumps({**json.loads(index.read_text()), "size": 99}))
    if harm != "short pixels":
        pixels.write_bytes(bytes(pixels.stat().st_size))
    assert np.array_equal(files.take(EVERY).pixels, reference)


@pytest.mark.parametrize("position", [0, 12 * 16 * 16 * 3 // 2, -1])
def test_changed_cache_is_rejected(position: int, files: ImageFiles, cache: Path) -> None:
    files.take(EVERY)
    file = next(cache.glob("*.u8"))
    pixels = bytearray(file.read_bytes())
    pixels[position] ^= 1
    file.write_bytes(pixels)
    with pytest.raises(
        FczooError, match=rf"^the pixels in {file} have changed .*; delete that file to decode"
    ):
        files.take(EVERY)
    file.unlink()
    assert np.array_equal(files.take(EVERY).pixels[7], prepare(files.root / files.names[7], 16))


def test_large_cache_is_verified_in_samples(
    files: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify some blocks of a large cache each time.

    Blocks have one image, three are verified each time, and one of them has changed.
    """
    monkeypatch.setattr("fczoo.data.image_cache.BLOCK", 1)
    monkeypatch.setattr("fczoo.data.image_cache.VERIFY_LIMIT", 3 * 16 * 16 * 3)
    files.take(EVERY)
    file = next(cache.glob("*.u8"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    outcomes = set()
    for _ in range(200):
        try:
            files.take(EVERY)
            outcomes.add("not seen")
        except FczooError:
            outcomes.add("seen")
    assert outcomes == {"seen", "not seen"}


def test_cache_without_checksums_is_rebuilt(files: ImageFiles, cache: Path) -> None:
    """Rebuild a cache without checksums, as earlier versions wrote it."""
    files.take(EVERY)
    index, pixels = next(cache.glob("*.json")), next(cache.glob("*.u8"))
    content = json.loads(index.read_text())
    assert len(content.pop("sha256 of blocks")) == 1
    index.write_text(json.dumps(content))
    pixels.write_bytes(bytes(pixels.stat().st_size))
    assert np.array_equal(files.take(EVERY).pixels[7], prepare(files.root / files.names[7], 16))


def test_killed_build_is_repeated(files: ImageFiles, cache: Path) -> None:
    script = (
        "import time, numpy as np; from pathlib import Path; import fczoo.data.image_files as f\n"
        "good = f.prepare\n"
        "def slow(path, size, **view):\n"
        "    if path.stem == '9': time.sleep(60)\n"
        "    return good(path, size, **view)\n"
        "f.prepare = slow\n"
        f"files = f.ImageFiles('toy', Path({str(files.root)!r}), {files.names!r}, np.arange(12) % "
        "3, 16)\n"
        "files.take(np.arange(12))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(cache.glob("*.tmp")) and not list(cache.glob("*.json"))
    assert np.array_equal(files.take(EVERY).pixels[9], prepare(files.root / files.names[9], 16))
    assert not list(cache.glob("*.tmp"))


def test_insufficient_disk_space_is_rejected(
    files: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 100, 100))
    with pytest.raises(FczooError, match=r"12 images at 16 pixels need .* --stored-size"):
        files.take(EVERY)
    assert not list(cache.glob("*.u8*"))
