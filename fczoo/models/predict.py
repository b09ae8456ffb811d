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
from fczoo.data.image_files import UnreadableImage, prepare
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


def predict_files(
    model: Classifier, files: Sequence[Path], top: int
) -> Iterator[Prediction | UnreadableImage]:
    """Yield the best classes of each image, or the error of a file that cannot be read.

    Args:
        model: Kept model.
        files: Image files.
        top: Number of classes per image.

    Raises:
        FczooError: ``top`` is below 1.
    """
    if top < 1:
        raise FczooError(f"--top is {top}; it must be a whole number from 1 up")
    size = model.record.stored_size
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        squares = [_square(path, size) for path in part]
        readable = [square for square in squares if isinstance(square, np.ndarray)]
        best = iter(_best_classes(model, readable, top))
        for path, square in zip(part, squares, strict=True):
            yield (Prediction(str(path), *next(best)) if isinstance(square, np.ndarray) else square)


def _square(path: Path, size: int) -> np.ndarray | UnreadableImage:
    """Return the pixels of a file, or the error that it gives."""
    try:
        return prepare(path, size, upright=True)
    except UnreadableImage as error:
        return error


def _best_classes(
    model: Classifier, squares: Sequence[np.ndarray], top: int
) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Return names and values of the best classes of each image, the best first."""
    if not squares:
        return []
    values = class_values(model, predict_pixels(model, np.stack(squares)))
    best = values.topk(min(top, int(model.get_buffer("has_images").sum())), dim=1)
    return [
        (tuple(model.classes[i] for i in indices), tuple(scores))
        for indices, scores in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


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
