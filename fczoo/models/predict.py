"""Predictions of a stored model on image files, and its evaluation on labelled images."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fczoo.core.class_metrics import class_accuracies, confusion_matrix, confusion_triples
from fczoo.core.errors import FczooError
from fczoo.core.files import home
from fczoo.core.metrics import seen_accuracy
from fczoo.core.names import join_first_names, shorten_list
from fczoo.core.registry import DATASETS
from fczoo.core.tree import Tree
from fczoo.data.dataset import ImageData, Images, Split
from fczoo.data.folder_layout import find_parts
from fczoo.data.folder_scan import scan
from fczoo.data.image_files import (
    UnreadableImage,
    class_folders,
    display_names,
    make_part,
    prepare,
    to_square,
)
from fczoo.data.stream import with_resize
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.device import deterministic_operations, plan_of
from fczoo.federation.evaluate import accuracy_row, calibration_error
from fczoo.models.classifier import Classifier

BATCH = 64  # images per forward


@dataclass(frozen=True)
class Prediction:
    """Most likely classes of one image, best first."""

    file: str
    classes: tuple[str, ...]
    values: tuple[float, ...]  # probabilities, or scores of a method without logits


def find_images(words: Iterable[str]) -> list[Path]:
    """Find the image files that arguments name, in order.

    Args:
        words: Files, folders (all images below them), and patterns of files or folders such as
            ``scans/*.png``.

    Raises:
        FczooError: An argument is empty, a pattern without files or a folder without images.
    """
    files: list[Path] = []
    for word in words:
        if not word:
            raise FczooError("an argument is empty; give files, folders or patterns of images")
        path = Path(word)
        if path.is_dir():
            images = _images_of(path)
        elif path.exists() or not glob.has_magic(word):
            images = [path]  # checked when it is read
        else:
            matches = map(Path, sorted(glob.glob(word, recursive=True)))
            # ** matches a folder and the files in it
            images = list(dict.fromkeys(image for match in matches for image in _images_of(match)))
        if not images:
            problem = "contains no images" if path.is_dir() else "matches no files"
            raise FczooError(f"{word} {problem}; give files, folders or patterns of images")
        files += images
    return files


def _images_of(path: Path) -> list[Path]:
    """Return the images below a folder, or the file itself."""
    return [path / name for name in scan(path).images] if path.is_dir() else [path]


def predict_files(
    model: Classifier, files: Sequence[Path], top: int
) -> Iterator[Prediction | UnreadableImage]:
    """Yield the best classes of each image, or the error of an unreadable file.

    Args:
        model: Stored model.
        files: Image files.
        top: Number of classes per image.

    Raises:
        FczooError: ``top`` is below 1.
    """
    if top < 1:
        raise FczooError(f"--top is {top}; it must be a whole number from 1 up")
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        squares = [_square(path, model) for path in part]
        readable_squares = [square for square in squares if isinstance(square, np.ndarray)]
        best = iter(_best_classes(model, readable_squares, top))
        for path, square in zip(part, squares, strict=True):
            yield (Prediction(str(path), *next(best)) if isinstance(square, np.ndarray) else square)


def _square(path: Path, model: Classifier) -> np.ndarray | UnreadableImage:
    """Return the pixels of a file as a stored square, or the error of an unreadable file."""
    try:
        return prepare(path, model.record.stored_size, True, model.record.resize)
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
    normalise = model.transform.normalise
    images = [normalise(torch.from_numpy(image).permute(2, 0, 1)) for image in pixels]
    logits: Tensor = model(torch.stack(images))
    return logits.cpu()


def class_values(model: Classifier, logits: Tensor) -> Tensor:
    """Return probabilities of the classes, or scores if the method has no logits.

    Args:
        model: Kept model.
        logits: Logits [B, C].
    """
    return logits.double().softmax(1) if model.method.training().gives_logits else logits.double()


MAX_LISTED = 5  # most unknown classes in a message


@dataclass(frozen=True)
class Evaluation:
    """Accuracy of a stored model on labelled images."""

    classes: tuple[str, ...]  # classes of the model
    confusion: np.ndarray  # int64 [C, C]: images by true class (row) and predicted class (column)
    ece: float | None  # expected calibration error in percent; None for scores

    @property
    def images(self) -> int:
        """Return the number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Return the accuracy in percent."""
        return 100 * float(np.trace(self.confusion)) / self.images

    @property
    def per_class(self) -> dict[str, tuple[float, int]]:
        """Return the accuracy in percent and the number of images of each class with images."""
        counts, accuracies = self.confusion.sum(1).tolist(), class_accuracies(self.confusion)
        return {
            name: (accuracy, count)
            for name, accuracy, count in zip(self.classes, accuracies, counts, strict=True)
            if count
        }

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "ece": self.ece,
            "per_class": {name: accuracy for name, (accuracy, _) in self.per_class.items()},
            "counts": {name: count for name, (_, count) in self.per_class.items()},
            "classes": list(self.classes),
            "confusion": self.confusion.tolist(),
        }


def repeat_evaluation(model: Classifier, bench: Benchmark) -> tuple[float, list[float]]:
    """Evaluate a model again as in the last evaluation of its run.

    Args:
        model: Stored model.
        bench: Benchmark of the run: the same images, partition and settings.

    Returns:
        A_t of the last learned task t, and the accuracies of the tasks, in percent.
    """
    seed, clients = model.record.seed, bench.partition.clients
    batch = plan_of(bench.settings, seed, bench.backbone.device, clients, 0).pass_size
    state: Tree = {name: v.to(bench.backbone.device) for name, v in model.state.items()}
    with deterministic_operations(bench.settings.deterministic):
        row = accuracy_row(model.method, bench, {None: state}, model.task, batch)
    record = model.record
    return seen_accuracy([*record.accuracy[:-1], row], record.test_counts, len(row) - 1), row


def labelled_images(
    model: Classifier, dataset: str | None, root: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Load labelled images of a data set or of class folders, with the model's labels.

    Args:
        model: Stored model, which must know all their classes.
        dataset: Name of a data set, whose test images are loaded; None: class folders.
        root: Data root of the data set, or folder with class folders. If the folder has parts, the
            test part is loaded.

    Returns:
        Pixels uint8 [N, S, S, 3] with the stored side of the model, and labels [N].

    Raises:
        FczooError: Images are missing, or the model does not know one of their classes.
    """
    size = model.record.stored_size
    if dataset is None:
        assert root is not None
        part, names = _class_folders(root, size)
    else:
        reader = DATASETS.get(dataset)()
        data: ImageData = reader.load(root or home() / "data")
        part, names = data.test, data.classes
    labels = np.asarray(part.labels)
    used_labels = np.unique(labels).tolist()
    unknown_names = [names[i] for i in used_labels if names[i] not in model.classes]
    if unknown_names:
        names_text = join_first_names(unknown_names, MAX_LISTED)
        known_text = shorten_list(model.classes, MAX_LISTED)
        raise FczooError(
            f"the model does not know the class{'es' if unknown_names[1:] else ''} {names_text}; "
            f"rename or remove {'them' if unknown_names[1:] else 'it'} (known: {known_text})"
        )
    arrival = np.zeros(len(names), np.int64)
    for i in used_labels:
        arrival[i] = model.classes.index(names[i])
    index = np.arange(len(labels))
    part = with_resize(part, model.record.resize)
    pixels = part.take(index, None if isinstance(part, Images) else size).pixels
    if pixels.shape[1] != size:
        pixels = np.stack([np.asarray(to_square(Image.fromarray(im), size)) for im in pixels])
    return pixels, arrival[labels]


def _class_folders(root: Path, size: int) -> tuple[Split, tuple[str, ...]]:
    if not root.is_dir():
        raise FczooError(f"no folder {root}; give --data-root a folder of class folders")
    parts = find_parts(root)
    folder = root if parts is None else parts[1] or parts[0]
    folders = class_folders(folder)
    part = replace(make_part("imagefolder", folder, folders, size), upright=True)
    return part, display_names(folders)


def evaluate(model: Classifier, pixels: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Evaluate a model on labelled images.

    Args:
        model: Kept model.
        pixels: uint8 [N, S, S, 3] with the stored side of the model.
        labels: Labels [N], numbered as ``model.classes``.
    """
    starts = range(0, len(labels), BATCH)
    logits = torch.cat([predict_pixels(model, pixels[i : i + BATCH]) for i in starts])
    predictions, count = logits.argmax(1).numpy(), len(model.classes)
    confusion = confusion_matrix(confusion_triples(labels, predictions, count), count)
    ece = None
    if model.method.training().gives_logits:
        confidence = class_values(model, logits).amax(1)
        ece = calibration_error(confidence, torch.from_numpy(predictions == labels))
    return Evaluation(model.classes, confusion, ece)
