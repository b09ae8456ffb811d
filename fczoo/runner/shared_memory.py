"""A benchmark that the worker processes of a sweep share through memory-mapped files.

Mapped pixels and weights are in memory once, however many processes read them. Workers start
faster, since they neither decode nor convert anything, and see exactly the parent's bytes.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from loky.backend import resource_tracker
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.tree import bytes_of
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import NO_PIXELS, Stream
from fczoo.federation.benchmark import Benchmark, open_stores
from fczoo.federation.device import pick_device
from fczoo.federation.settings import Settings

ALIGNMENT = 64  # bytes, as torch allocates; the last bits of products may depend on it
Place = tuple[int, torch.dtype, tuple[int, ...]]
"""First byte, type and shape of a weight in the file of weights."""


@dataclass(frozen=True)
class Pixels:
    """File and shape of the pixels of training or test images."""

    file: Path
    shape: tuple[int, ...]

    def map_pixels(self) -> np.ndarray:
        """Map the pixels; changed pages are private, because torch requires writable memory."""
        if not np.prod(self.shape):
            return np.empty(self.shape, np.uint8)
        return np.memmap(self.file, np.uint8, "c", shape=self.shape)


@dataclass(frozen=True)
class SharedBenchmark:
    """Benchmark whose pixels and weights are in files."""

    settings: Settings
    stream: Stream  # without pixels
    partition: Partition
    train: Pixels
    test: Pixels
    config: ViTConfig
    sha256: str  # of the backbone
    weights: Path
    places: Mapping[str, Place]

    def open(self) -> Benchmark:
        """Open the benchmark on this process's device, as ``Benchmark.open`` does."""
        size = self.weights.stat().st_size
        flat = torch.from_file(str(self.weights), shared=False, size=size, dtype=torch.uint8)
        tensors = {name: _tensor(flat, *place) for name, place in self.places.items()}
        backbone = Backbone(self.config, tensors, self.sha256, copy=False)
        device = pick_device(self.settings.device)
        if device.type != "cpu":
            backbone = backbone.to(device)
        train = self.stream.train._replace(pixels=self.train.map_pixels())
        test = self.stream.test._replace(pixels=self.test.map_pixels())
        stream = replace(self.stream, train=train, test=test)
        stores = open_stores((train, test), backbone, self.settings.test_crop)
        return Benchmark(self.settings, stream, self.partition, backbone, *stores)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary folder that is removed even if this process is killed.

    In this case Loky's resource tracker, a separate process, removes it once this process and its
    workers have ended.
    """
    with TemporaryDirectory(prefix="fczoo-") as folder:
        resource_tracker.register(folder, "folder")
        try:
            yield Path(folder)
        finally:
            resource_tracker.unregister(folder, "folder")


def share(bench: Benchmark, folder: Path) -> SharedBenchmark:
    """Write pixels and weights of a benchmark to ``folder``, unless it has these files.

    Pixels that are a memory-mapped file stay there. Raises FczooError if writing fails, as on a
    full disk.
    """
    stream = bench.stream
    try:
        train, test = (
            _share_pixels(images.pixels, folder) for images in (stream.train, stream.test)
        )
        weights, places = _share_weights(bench.backbone.weights, folder)
    except OSError as error:
        reason = error.strerror or first_line(error)  # numpy's error of a full disk has no strerror
        problem = f"cannot share data and weights with --jobs in {folder}: {reason}"
        raise FczooError(
            f"{problem}; free some space, set TMPDIR to another folder, or use --jobs 1"
        ) from error
    bare_stream = replace(stream, train=_drop_pixels(stream.train), test=_drop_pixels(stream.test))
    config, sha256 = bench.backbone.config, bench.backbone.sha256
    return SharedBenchmark(
        bench.settings, bare_stream, bench.partition, train, test, config, sha256, weights, places
    )


def _drop_pixels(images: Images) -> Images:
    return images._replace(pixels=NO_PIXELS)


def _share_pixels(pixels: np.ndarray, folder: Path) -> Pixels:
    if isinstance(pixels, np.memmap) and pixels.filename and _is_whole(pixels):
        return Pixels(Path(pixels.filename), pixels.shape)
    flat = np.ascontiguousarray(pixels)
    file = folder / f"{hashlib.sha256(flat.data).hexdigest()}.u8"
    if not file.exists():
        flat.tofile(file)
    return Pixels(file, pixels.shape)


def _is_whole(pixels: np.memmap) -> bool:
    return Path(str(pixels.filename)).stat().st_size == pixels.nbytes


def _share_weights(weights: Mapping[str, Tensor], folder: Path) -> tuple[Path, dict[str, Place]]:
    places, digest, end = dict[str, Place](), hashlib.sha256(), 0
    for name, tensor in weights.items():
        places[name] = end, tensor.dtype, tuple(tensor.shape)
        digest.update(f"{name} {places[name]}".encode() + bytes_of(tensor))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    file = folder / f"{digest.hexdigest()}.weights"
    if not file.exists():
        with file.open("wb") as out:
            for name, tensor in weights.items():
                out.seek(places[name][0])
                out.write(bytes_of(tensor))
            out.truncate(end)
    return file, places


def _tensor(flat: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * int(np.prod(shape))
    return flat[start : start + size].view(dtype).view(shape)
