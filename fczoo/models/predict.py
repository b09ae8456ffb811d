"""Predictions of a kept model on image files."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.data.folder_scan import scan
from fczoo.data.image_files import prepare
from fczoo.models.classifier import Classifier

BATCH = 64  # images of one forward


@dataclass(frozen=True)
class Prediction:
    """Best classes of one image, the best first."""

    file: str
    classes: tuple[str, ...]
    values: tuple[float, ...]  # probabilities, or scores of a method without logits


def find_images(words: Iterable[str]) -> list[Path]:
    """Return the image files that words name, in their order.

    Args:
        words: Files, folders (all images below them) and patterns such as ``scans/*.png``, of
            files or folders.

    Raises:
        FczooError: A word names nothing, or a folder without images.
    """
    files: list[Path] = []
    for word in words:
        if not word:
            raise FczooError("an empty word names no image; give files, folders or patterns")
        path = Path(word)
        if path.is_dir():
            images = _images_of(path)
        elif path.exists() or not glob.has_magic(word):
            images = [path]  # reading it says whether it is an image
        else:
            matches = map(Path, sorted(glob.glob(word, recursive=True)))
            # ** matches a folder and the files in it
            images = list(dict.fromkeys(image for match in matches for image in _images_of(match)))
        if not images:
            kind = "folder without images" if path.is_dir() else "pattern without files"
            raise FczooError(f"{word} is a {kind}; give files, folders or patterns of images")
        files += images
    return files


def _images_of(path: Path) -> list[Path]:
    """Return the images below a folder, or the file itself."""
    return [path / name for name in scan(path).images] if path.is_dir() else [path]


def predict_files(model: Classifier, files: Sequence[Path], top: int) -> Iterator[Prediction]:
    """Yield the best classes of each image.

    Args:
        model: Kept model.
        files: Image files.
        top: Number of classes per image.

    Raises:
        FczooError: A file is missing or not an image, or ``top`` is below 1.
    """
    if top < 1:
        raise FczooError(f"--top is {top}; it must be a whole number from 1 up")
    size = model.record.stored_size
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        pixels = np.stack([prepare(path, size) for path in part])
        values = class_values(model, predict_pixels(model, pixels))
        count = min(top, int(model.get_buffer("has_images").sum()))
        best = values.topk(count, dim=1)
        for path, indices, scores in zip(
            part, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            yield Prediction(str(path), tuple(model.classes[i] for i in indices), tuple(scores))


@torch.no_grad()
def predict_pixels(model: Classifier, pixels: np.ndarray) -> Tensor:
    """Return the logits [B, C] of square images, on the CPU.

    Args:
        model: Kept model.
        pixels: uint8 [B, S, S, 3] with the stored side S of the model.
    """
    _, view = model.transform.transforms
    images = [view(torch.from_numpy(image).permute(2, 0, 1)) for image in pixels]
    logits: Tensor = model(torch.stack(images))
    return logits.cpu()


def class_values(model: Classifier, logits: Tensor) -> Tensor:
    """Return probabilities of the classes, or scores if the method has no logits.

    Args:
        model: Kept model.
        logits: Logits [B, C].
    """
    return logits.double().softmax(1) if model.method.training().gives_logits else logits.double()
