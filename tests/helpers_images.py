"""Write small image folders for tests."""

import os
from pathlib import Path

import numpy as np
from PIL import Image


def noise(path: Path, mode: str = "RGB") -> None:
    """Write an image whose pixels follow from its path."""
    seed = list(os.fsencode(path))
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def parts(root: Path, train: str = "train", test: str = "test") -> Path:
    """Write classes a and b with three training images and one test image each."""
    for name in "ab":
        for i in range(3):
            noise(root / train / name / f"{i}.png")
        noise(root / test / name / "9.png")
    return root
