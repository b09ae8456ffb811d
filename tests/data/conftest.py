"""Provide a server, a data set to download, image files and their cache."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Dataset, ImageData, Images
from fczoo.data.image_files import ImageFiles
from helpers_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.hold = False
        running.shutdown()
        thread.join()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Dataset]:
    """Register a data set of one file ``toy/good`` that can be downloaded."""

    class Toy(Dataset):
        name, about, classes, folder, source, licence = "toy", "toy", 1, "toy", "toy.tar.gz", "free"

        def load(self, root: Path) -> ImageData:
            images = Images(np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64))
            return ImageData(images, images, ("only",))

    monkeypatch.setitem(DATASETS._entries, "toy", Toy)
    return Toy


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty FCZOO_HOME; return the folder of the cache of image files in it."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "cache" / "images"


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    """Write twelve noisy images of 20x16 in three classes."""
    rng, names = np.random.default_rng(0), []
    for i in range(12):
        name = f"class{i % 3}/{i}.png"
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(
            tmp_path / "data" / name
        )
        names.append(name)
    return ImageFiles("toy", tmp_path / "data", tuple(names), np.arange(12) % 3, 16)
