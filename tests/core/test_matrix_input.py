"""Test ``fczoo.compute_metrics`` on matrices of other software, by hand."""

import math

import numpy as np
import pytest
import torch

import fczoo
from fczoo.core.metrics import METRICS, MORE_METRICS

NAN = math.nan
ROWS = [[60], [75, 90], [30, 96, 50]]  # the example of docs/metrics.md
COUNTS = [10, 20, 30]
BY_HAND = {
    "A_N": 62,  # (10 * 30 + 20 * 96 + 30 * 50) / 60
    "Avg": 69,  # (60 + 85 + 62) / 3
    "FAA": 176 / 3,
    "Abar": (60 + 82.5 + 176 / 3) / 3,
    "forgetting": 19.5,  # (45 - 6) / 2
    "forgetting_first": 8,  # (30 - 6 + 0) / 3
    "forgetting_best": 15,  # (45 + 0 + 0) / 3
    "BWT": -12,  # (-30 + 6) / 2
    "plasticity": 200 / 3,
    "AUC": 73,  # ((60 + 85) / 2 + (85 + 62) / 2) / 2
}
SQUARE = [[60, NAN, 1000], [75, 90, -3], [30, 96, 50]]  # above the diagonal nothing is read


@pytest.mark.parametrize(
    "matrix",
    [ROWS, SQUARE, np.array(SQUARE), torch.tensor(SQUARE), [np.array(row) for row in ROWS]],
    ids=["rows", "square", "array", "tensor", "rows of arrays"],
)
def test_every_metric_by_hand(matrix):
    values = fczoo.compute_metrics(matrix, np.array(COUNTS))
    assert values.keys() >= {*METRICS, *MORE_METRICS}
    assert {name: values[name] for name in BY_HAND} == pytest.approx(BY_HAND)


def test_data_frame_is_accepted():
    pandas = pytest.importorskip("pandas")
    values = fczoo.compute_metrics(pandas.DataFrame(SQUARE), pandas.Series(COUNTS))
    assert values["A_N"] == pytest.approx(62)


def test_missing_counts_mean_equal_task_sizes():
    values = fczoo.compute_metrics(ROWS)
    assert values["A_N"] == values["FAA"] == pytest.approx(176 / 3)
    assert fczoo.compute_metrics([[90.5]])["forgetting"] == 0


def test_task_without_images_is_ignored():
    values = fczoo.compute_metrics([[60], [75, NAN], [30, NAN, 50]], [10, 0, 30])
    assert values["A_N"] == pytest.approx((10 * 30 + 30 * 50) / 40)
    assert values["FAA"] == pytest.approx(40)


def test_fractions_give_fractions():
    shares = [[value / 100 for value in row] for row in ROWS]
    expected = {name: value / 100 for name, value in fczoo.compute_metrics(ROWS).items()}
    assert fczoo.compute_metrics(shares) == pytest.approx(expected)


FORM = "give rows of 1, 2, ..., T numbers, or T rows of T"


@pytest.mark.parametrize(
    ("matrix", "counts", "message"),
    [
        ([], None, f"accuracy is [], which is not a matrix; {FORM}"),
        (50.0, None, f"accuracy is 50.0, which is not a matrix; {FORM}"),
        ("90", None, f"accuracy is '90', which is not a matrix; {FORM}"),
        ([60, 70], None, f"accuracy is [60, 70], which is not a matrix; {FORM}"),
        ([[1, 2, 3], [4, 5, 6]], None, f"accuracy has 2 rows of 3; {FORM}"),
        (np.ones((3, 2)), None, f"accuracy has 3 rows of 2; {FORM}"),
        ([[1], [4, 5], [6, 7]], None, f"accuracy has rows of 1, 2 and 2; {FORM}"),
        ([[60], ["x", 5]], None, "accuracy[1][0] is 'x'; give a number in percent"),
        ([[60], [None, 5]], None, "accuracy[1][0] is None; give a number in percent"),
        ([[60], [101, 5]], None, "accuracy[1][0] is 101; give percentages from 0 to 100"),
        ([[60], [-1, 5]], None, "accuracy[1][0] is -1; give percentages from 0 to 100"),
        ([[math.inf]], None, "accuracy[0][0] is inf; give percentages from 0 to 100"),
        (
            [[60], [NAN, 5]],
            None,
            "accuracy[1][0] is nan; give test_counts with 0 for a task without images",
        ),
        (
            [[60], [NAN, 5]],
            [2, 2],
            "accuracy[1][0] is nan; give test_counts with 0 for a task without images",
        ),
        (
            ROWS,
            [1],
            "test_counts is [1]; give 3 whole numbers, the numbers of test images per task",
        ),
        (ROWS, 10, "test_counts is 10; give 3 whole numbers, the numbers of test images per task"),
        (
            ROWS,
            [1, -1, 1],
            "test_counts is [1, -1, 1]; give 3 whole numbers, the numbers of test images per task",
        ),
        (
            ROWS,
            [1, 0.5, 1],
            "test_counts is [1, 0.5, 1]; give 3 whole numbers, the numbers of test images per task",
        ),
        (
            ROWS,
            [0, 0, 0],
            "test_counts is 0 for all tasks; give the numbers of test images per task",
        ),
    ],
)
def test_invalid_matrix_is_rejected(matrix, counts, message):
    with pytest.raises(fczoo.FczooError) as error:
        fczoo.compute_metrics(matrix, counts)
    assert str(error.value) == message
