"""Metrics of single images: cases by hand, scikit-learn's figures, and bounds."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import top_k_accuracy_score

from fczoo.federation.evaluate import (
    BINS,
    calibration_error,
    confidences,
    is_in_top,
    task_predictions,
)

some = settings(max_examples=60, deadline=None)
LOWEST = torch.finfo(torch.float64).min


def random_logits(seed: int, images: int = 40, classes: int = 7) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=rng, dtype=torch.float64)
    return logits, torch.randint(classes, (images,), generator=rng)


def test_task_answers_by_hand() -> None:
    """Choose among the classes of each image's task; without them an image has no answer."""
    logits = torch.tensor(
        [
            [9.0, 0.0, 1.0, 2.0],
            [0.0, 9.0, 2.0, 1.0],
            [0.0, 1.0, LOWEST, LOWEST],
            [0.0, 1.0, -torch.inf, -torch.inf],
            [5.0, 5.0, -torch.inf, -7.0],
            [0.0, 1.0, 9.0, 9.0],
        ],
        dtype=torch.float64,
    )
    classes = torch.tensor([[2, 4]] * 5 + [[0, 2]])
    assert task_predictions(logits, classes).tolist() == [3, 2, -1, -1, 3, 1]


def test_in_top_by_hand() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, -torch.inf, 1.0, 2.0]])
    labels = torch.tensor([2, 2, 1])
    # ranks: 3; 3 of equal ones, because the lower class comes first; excluded
    assert is_in_top(logits, labels, 2).tolist() == [False, False, False]
    assert is_in_top(logits, labels, 3).tolist() == [True, True, False]
    assert is_in_top(logits, labels, 9).tolist() == [True, True, False]


def test_confidence_by_hand() -> None:
    """Give the softmax of the answer: e^2 / (e^2 + 1 + 1) and 1/2 where a class is excluded."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, -torch.inf]], dtype=torch.float64)
    expected = [np.exp(2) / (np.exp(2) + 2), 0.5]
    assert confidences(logits).tolist() == pytest.approx(expected, abs=1e-12)
    assert confidences(logits.bfloat16()).dtype == torch.float32


def test_calibration_error_by_hand() -> None:
    """Sum over bins: two bins of two and one bin of one image.

    (0.8, 0.8], bin 12 of 15: one of two right, 0.8 claimed: 2/5 * 0.3. Bin 8, (7/15, 8/15]: both
    right, 0.5 claimed: 2/5 * 0.5. Bin 15: 1.0 claimed, wrong: 1/5 * 1. Sum 0.12 + 0.2 + 0.2 = 0.52.
    """
    confidence = torch.tensor([0.8, 0.8, 0.5, 0.5, 1.0], dtype=torch.float64)
    correct = torch.tensor([True, False, True, True, False])
    assert calibration_error(confidence, correct) == pytest.approx(52.0, abs=1e-9)
    # one bin: |3/5 - 3.6/5| = 0.12
    assert calibration_error(confidence, correct, bins=1) == pytest.approx(12.0, abs=1e-9)
    assert np.isnan(calibration_error(confidence[:0], correct[:0]))


@some
@given(st.integers(0, 2**31), st.integers(1, 7))
def test_top_k_matches_scikit_learn(seed: int, k: int) -> None:
    logits, labels = random_logits(seed)
    share = is_in_top(logits, labels, k).double().mean()
    if k == 7:
        assert share == 1
    else:
        reference = top_k_accuracy_score(labels.numpy(), logits.numpy(), k=k, labels=range(7))
        assert float(share) == pytest.approx(reference)


@some
@given(st.integers(0, 2**31))
def test_calibration_error_matches_scikit_learn(seed: int) -> None:
    """Compare with the reliability diagram of scikit-learn: its bins, without their sizes."""
    logits, labels = random_logits(seed, images=200)
    confidence, correct = confidences(logits), logits.argmax(1) == labels
    right, claimed = calibration_curve(correct.numpy(), confidence.numpy(), n_bins=BINS)
    bins = np.clip(np.ceil(confidence.numpy() * BINS), 1, BINS)
    sizes = np.unique(bins, return_counts=True)[1]
    reference = 100 * (sizes / 200 * np.abs(right - claimed)).sum()
    assert calibration_error(confidence, correct) == pytest.approx(reference)


@some
@given(st.integers(0, 2**31))
def test_metrics_have_bounds_and_ignore_order(seed: int) -> None:
    """Check that more answers never hurt, a known task never hurts, and order does not matter."""
    logits, labels = random_logits(seed)
    hits = [is_in_top(logits, labels, k) for k in range(1, 8)]
    assert hits[0].equal(logits.argmax(1) == labels)
    assert all((a <= b).all() for a, b in pairwise(hits))
    of_task = (labels >= 2) & (labels < 4)
    aware = (
        task_predictions(logits, torch.tensor([[2, 4]] * len(labels)))[of_task] == labels[of_task]
    )
    assert (aware >= hits[0][of_task]).all()
    confidence, order = confidences(logits), torch.randperm(len(labels))
    error = calibration_error(confidence, hits[0])
    assert 0 <= error <= 100
    assert calibration_error(confidence[order], hits[0][order]) == pytest.approx(error)
