"""The handwritten digits that ship with scikit-learn: real images, no download."""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Images


@register_dataset("digits")
class Digits(Dataset):
    """1,797 images of 8x8 pixels, upscaled to 32x32 RGB.

    A fifth of every class is held out as the test part.
    """

    classes = 10
    about = (
        "handwritten digits of scikit-learn, 10 classes, upscaled to 32x32 RGB, stratified 80/20 "
        "split"
    )
    defaults = Defaults(
        "vit_nano_32",
        tasks=5,
        clients=5,
        partition="dirichlet:0.5",
        rounds=2,
        epochs=1,
        batch_size=8,
        augment="none",
    )

    def load(self, root: Path) -> ImageData:
        from sklearn.model_selection import train_test_split  # takes a second

        pixels, labels = _all_digits()
        train, test = train_test_split(
            np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
        )
        train, test = np.sort(train), np.sort(test)
        return ImageData(
            Images(pixels[train], labels[train]),
            Images(pixels[test], labels[test]),
            tuple("0123456789"),
            "stratified 80/20 of scikit-learn, seed 0",
        )


@cache
def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [1797, 32, 32, 3] and labels; a grid opens them for each of its settings."""
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    larger = [Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC) for image in grey]
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in larger])
    return pixels, digits.target.astype(np.int64)
