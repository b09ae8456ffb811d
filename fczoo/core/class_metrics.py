"""Metrics of classes, of pairs of tasks and of clients, each with its formula.

``m[c][d]`` is the number of test images of class c that were predicted as class d.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Triples = Sequence[Sequence[int]]
"""Non-zero entries (c, d, m[c][d]) of a confusion matrix, sorted."""

WORST_SHARE = 0.1  # share of the clients that ``worst_clients`` is about


def confusion_triples(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[list[int]]:
    """Count the images of each class c that were predicted as class d.

    Args:
        labels: True classes c [n].
        predicted: Predicted classes d [n].
        classes: Number of classes.
    """
    pairs, counts = np.unique(labels * classes + predicted, return_counts=True)
    return [[*map(int, entry)] for entry in zip(*divmod(pairs, classes), counts, strict=True)]


def confusion_matrix(triples: Triples, classes: int) -> np.ndarray:
    """Convert triples to the confusion matrix m [classes, classes].

    Args:
        triples: Entries that are not zero.
        classes: Number of classes.
    """
    matrix = np.zeros((classes, classes), np.int64)
    for label, answer, count in triples:
        matrix[label, answer] = count
    return matrix


def class_accuracies(m: np.ndarray) -> list[float]:
    """Compute r_c = m[c][c] / sum_d m[c][d] of every class, in percent: its recall.

    Args:
        m: Confusion matrix [C, C].

    Returns:
        C accuracies; NaN for a class without test images.
    """
    totals, correct = m.sum(1).tolist(), m.diagonal().tolist()
    return [
        100 * right / total if total else math.nan
        for right, total in zip(correct, totals, strict=True)
    ]


def task_confusion(m: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Compute the share of task i's images that were predicted as a class of task j, in percent.

    It is sum_{c in i, d in j} m[c][d] / sum_{c in i} sum_d m[c][d].

    Args:
        m: Confusion matrix [C, C], classes in order of their tasks.
        sizes: Number of classes of each task.

    Returns:
        Shares [T, T]; rows of tasks without test images are NaN.
    """
    starts = np.cumsum([0, *sizes[:-1]])
    counts = np.add.reduceat(np.add.reduceat(m, starts, 0), starts, 1).astype(float)
    totals = counts.sum(1, keepdims=True)
    shares: np.ndarray = np.full_like(counts, np.nan)
    np.divide(100 * counts, totals, out=shares, where=totals > 0)
    return shares


def client_accuracies(
    class_accuracy: Sequence[float], owners: np.ndarray, labels: np.ndarray, clients: int
) -> list[float | None]:
    """Compute q_k = sum_c p_k(c) r_c per client k: accuracy on test images with its class mix.

    p_k(c) is the share of class c among the client's training images of classes with test images.

    Args:
        class_accuracy: Accuracies r_c [C] in percent; NaN without test images.
        owners: Client of each training image [n]; an image of two clients is listed twice.
        labels: Class of each training image [n].
        clients: Number K of clients.

    Returns:
        K accuracies in percent; None for a client without images of a tested class.
    """
    accuracy = np.asarray(class_accuracy, float)[labels]
    has_accuracy = ~np.isnan(accuracy)
    counts = np.bincount(owners[has_accuracy], minlength=clients)
    sums = np.bincount(owners[has_accuracy], accuracy[has_accuracy], minlength=clients)
    return [
        min(float(value / count), 100.0) if count else None
        for value, count in zip(sums, counts, strict=True)
    ]


def mean_of_clients(accuracies: Iterable[float | None]) -> float:
    """Compute the mean 1/K sum_k q_k over the clients that have an accuracy.

    Args:
        accuracies: Accuracies q_k in percent; None is left out.

    Returns:
        The mean in percent; NaN without any.
    """
    values = [q for q in accuracies if q is not None]
    return math.fsum(values) / len(values) if values else math.nan


def std_of_clients(accuracies: Iterable[float | None]) -> float:
    """Compute the standard deviation sqrt(1/K sum_k (q_k - mean)^2) over clients with an accuracy.

    Args:
        accuracies: Accuracies q_k in percent; None is left out.

    Returns:
        The deviation in percentage points; NaN if no client has an accuracy.
    """
    values = [q for q in accuracies if q is not None]
    mean = mean_of_clients(values)
    return math.sqrt(mean_of_clients((q - mean) ** 2 for q in values)) if values else math.nan


def worst_clients(accuracies: Iterable[float | None], share: float = WORST_SHARE) -> float:
    """Compute the mean over the ceil(share K) clients with the lowest accuracies.

    Args:
        accuracies: Accuracies q_k in percent; None is left out.
        share: Share of the clients.

    Returns:
        The mean in percent; NaN without any.
    """
    values = sorted(q for q in accuracies if q is not None)
    return mean_of_clients(values[: math.ceil(share * len(values))])


CLIENT_METRICS: dict[str, Callable[[Iterable[float | None]], float]] = {
    "mean": mean_of_clients,
    "std": std_of_clients,
    "worst": worst_clients,
}
