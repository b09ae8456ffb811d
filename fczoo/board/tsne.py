"""t-SNE figures: features of test images from stored models."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fczoo.core.errors import FczooError
from fczoo.core.options import plural
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.model_record import RECORD
from fczoo.models.classifier import Classifier
from fczoo.models.predict import BATCH
from fczoo.models.storage import load_model
from fczoo.reports.figure_data import Points
from fczoo.reports.runs import Experiment

ColourBy = Literal["class", "task"]
OpenBenchmark = Callable[[Path, Classifier], Benchmark]
MAX_IMAGES = 500  # images in a figure
MAX_LABELS = 18  # labels in a legend: a page has six colours and three kinds of points
PERPLEXITY = 30.0  # as in the paper; with few images, a third of their number


def tsne_figures(
    experiment: Experiment, colour_by: ColourBy, open_benchmark: OpenBenchmark
) -> list[Points]:
    """Plot one figure per line: t-SNE of the features from its first stored model.

    Args:
        experiment: Experiment whose run folders contain models.
        colour_by: Label of an image: its class or its task.
        open_benchmark: Function that opens the benchmark of a run, from the folder of a model and
            the model.

    Returns:
        Figures of the lines that have a model.

    Raises:
        FczooError: No line has a model, or the figure would have too many labels.
    """
    figures = []
    for line in experiment.lines:
        for record in line.records:
            if record.folder and (record.folder / RECORD).is_file():
                model = load_model(record.folder)
                bench = open_benchmark(record.folder, model)
                figures.append(_figure(line.label, record.seed, model, bench, colour_by))
                break
    if not figures:
        raise FczooError(
            "t-SNE needs the model of a run, but no folder has one; run `fczoo bench` without "
            "--no-keep-model"
        )
    return figures


def _figure(
    label: str, seed: int, model: Classifier, bench: Benchmark, colour_by: ColourBy
) -> Points:
    names = [*model.classes] if colour_by == "class" else _tasks_of_classes(model)
    count = len(set(names))
    if count > MAX_LABELS:
        advice = "use --tsne task" if colour_by == "class" else "give runs with fewer tasks"
        raise FczooError(
            f"t-SNE by {colour_by} has {count} labels, but a figure shows at most {MAX_LABELS}; "
            f"{advice}"
        )
    index = _first_images_per_class(np.asarray(bench.stream.test.labels), len(names))
    positions = project(_features(model, bench, index))
    image_names = np.array(names)[np.asarray(bench.stream.test.labels)[index]]
    return Points(
        name=f"t-SNE {label}",
        caption=(
            f"{label}: t-SNE of the features of {plural(len(index), 'test image')} under the final "
            f"model of seed {seed}, by {colour_by}; distances between clusters are not meaningful"
        ),
        x="first axis of t-SNE",
        y="second axis of t-SNE",
        points={name: positions[image_names == name] for name in dict.fromkeys(names)},
        of_methods=False,
    )


def _tasks_of_classes(model: Classifier) -> list[str]:
    """Return the name of each class's first task."""
    first_task: dict[int, str] = {}
    for number, task in enumerate(model.record.tasks, 1):
        for c in range(task["start"], task["stop"]):
            first_task.setdefault(c, f"task {number}")
    return [first_task[c] for c in range(len(model.classes))]


def _first_images_per_class(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return positions of the first images per class, equally many, up to ``MAX_IMAGES``."""
    share = max(1, MAX_IMAGES // classes)
    return np.concatenate([np.flatnonzero(labels == c)[:share] for c in range(classes)])


@torch.inference_mode()
def _features(model: Classifier, bench: Benchmark, index: np.ndarray) -> np.ndarray:
    parts = torch.from_numpy(index).split(BATCH)
    features = [model.features(bench.test.view(part)).float().cpu() for part in parts]
    return torch.cat(features).numpy()


def project(features: np.ndarray) -> np.ndarray:
    """Project features to two dimensions by t-SNE from scikit-learn, with a fixed seed.

    Args:
        features: Features [n, D] of at least four images.

    Returns:
        Positions [n, 2].

    Raises:
        FczooError: There are fewer than four images.
    """
    from sklearn.manifold import TSNE  # takes a second

    if len(features) < 4:
        raise FczooError(f"t-SNE has only {len(features)} test images; it needs four or more")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    projection = TSNE(2, perplexity=perplexity, init="pca", random_state=0)
    positions: np.ndarray = projection.fit_transform(features)
    return positions
