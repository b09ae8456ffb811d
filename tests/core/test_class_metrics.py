"""Test metrics of classes, tasks and clients: by hand, against scikit-learn, and bounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix as sklearn_confusion
from sklearn.metrics import recall_score

from fczoo.core.class_metrics import (
    class_accuracies,
    client_accuracies,
    confusion_matrix,
    confusion_triples,
    mean_of_clients,
    std_of_clients,
    task_confusion,
    worst_clients,
)

property_settings = settings(max_examples=60, deadline=None)
LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 2])
ANSWERS = np.array([0, 0, 0, 2, 0, 1, 2, 2])
TRIPLES = [[0, 0, 3], [0, 2, 1], [1, 0, 1], [1, 1, 1], [2, 2, 2]]


def test_confusion_by_hand() -> None:
    assert confusion_triples(LABELS, ANSWERS, 3) == TRIPLES
    assert confusion_matrix(TRIPLES, 3).tolist() == [[3, 0, 1], [1, 1, 0], [0, 0, 2]]
    assert confusion_triples(LABELS[:0], ANSWERS[:0], 3) == []


def test_class_accuracies_by_hand() -> None:
    """Give 3 of 4, 1 of 2, 2 of 2, and NaN for a fourth class without images."""
    accuracies = class_accuracies(confusion_matrix(TRIPLES, 4))
    assert accuracies[:3] == [75.0, 50.0, 100.0] and math.isnan(accuracies[3])


def test_confusion_between_tasks_by_hand() -> None:
    """Merge classes 0 and 1 to a task: 5 of its 6 images stay in it; a third task has none."""
    shares = task_confusion(confusion_matrix(TRIPLES, 4), [2, 1, 1])
    assert shares[:2] == pytest.approx(np.array([[500 / 6, 100 / 6, 0], [0, 100, 0]]))
    assert np.isnan(shares[2]).all()


def images_of(counts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return owner and label of each image, from numbers [clients][classes]."""
    images = [(k, c) for k, row in enumerate(counts) for c, n in enumerate(row) for _ in range(n)]
    owners, labels = np.array(images, dtype=np.int64).reshape(-1, 2).T
    return owners, labels


def test_client_accuracies_by_hand() -> None:
    """Weigh 75, 50 and 100 % by the class mix of each client.

    Mixes: only class 0; half 1, half 2: (50 + 100) / 2; 1/4, 1/4, 1/2: 81.25; only the untested
    class; 1/2 of class 0 and the rest untested, which is left out: 75.
    """
    counts = [[5, 0, 0, 0], [0, 2, 2, 0], [1, 1, 2, 0], [0, 0, 0, 3], [1, 0, 0, 1]]
    accuracies = client_accuracies([75.0, 50.0, 100.0, math.nan], *images_of(counts), 6)
    assert accuracies[:3] == pytest.approx([75.0, 75.0, 81.25])
    assert accuracies[3:] == [None, 75.0, None]  # the sixth client has no image


def test_client_statistics_by_hand() -> None:
    """Compare with 20, 40, 60, 80: mean 50, deviation sqrt((900 + 100 + 100 + 900) / 4)."""
    clients = [60.0, 20.0, None, 80.0, 40.0]
    assert mean_of_clients(clients) == 50.0
    assert std_of_clients(clients) == pytest.approx(math.sqrt(500))
    assert worst_clients(clients) == 20.0  # ceil(0.1 * 4) = 1 client
    assert worst_clients(clients, share=0.5) == 30.0
    assert worst_clients([float(q) for q in range(11)]) == 0.5  # ceil(1.1) = 2 clients
    for figure in (mean_of_clients, std_of_clients, worst_clients):
        assert math.isnan(figure([None]))


@property_settings
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_confusion_matches_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    labels, answers = np.array(pairs).T
    matrix = confusion_matrix(confusion_triples(labels, answers, 5), 5)
    assert (matrix == sklearn_confusion(labels, answers, labels=range(5))).all()
    recalls = recall_score(labels, answers, labels=range(5), average=None, zero_division=np.nan)
    assert class_accuracies(matrix) == pytest.approx([*(100 * recalls)], nan_ok=True)
    rows = np.nansum(task_confusion(matrix, [2, 1, 2]), 1)
    assert all(row == pytest.approx(100) or row == 0 for row in rows)


@property_settings
@given(
    st.lists(st.floats(0, 100), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_client_statistics_are_bounded(
    accuracies: list[float], counts: list[list[int]], rng
) -> None:
    """Check clients against the range of the classes, and the worst against the mean."""
    clients = client_accuracies(accuracies, *images_of(counts), len(counts))
    for value, mix in zip(clients, counts, strict=True):
        assert (value is None) == (sum(mix) == 0)
        assert value is None or min(accuracies) - 1e-9 <= value <= max(accuracies) + 1e-9
    if clients == [None] * len(clients):
        return
    mean, std, worst = mean_of_clients(clients), std_of_clients(clients), worst_clients(clients)
    assert worst <= mean + 1e-9 and 0 <= std <= 50 + 1e-9
    rng.shuffle(clients)
    assert mean_of_clients(clients) == pytest.approx(mean)
    assert std_of_clients(clients) == pytest.approx(std, abs=1e-9)
    assert worst_clients(clients) == pytest.approx(worst)
