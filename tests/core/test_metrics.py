"""Test metrics: one accuracy matrix by hand, single-task runs, and relations of metrics."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo.core.metrics import (
    BASE_METRICS,
    METRICS,
    MORE_METRICS,
    all_metrics,
    base_accuracy,
    forward_transfer,
    harmonic_mean,
    has_base_task,
    intransigence,
    novel_accuracy,
    seen_accuracy,
)

# Three tasks with 10, 20 and 30 test images. Task 0 gets better before it gets worse;
# task 1 gets better at the end.
A = [
    [60.0],
    [75.0, 90.0],
    [30.0, 96.0, 50.0],
]
N = [10, 20, 30]

# Pooled: A_0 = 60; A_1 = (10 * 75 + 20 * 90) / 30 = 2550 / 30 = 85;
# A_2 = (300 + 1920 + 1500) / 60 = 3720 / 60 = 62.
BY_HAND = {
    "A_N": 62.0,
    "Avg": 69.0,  # (60 + 85 + 62) / 3 = 207 / 3
    "FAA": 176 / 3,  # (30 + 96 + 50) / 3
    "Abar": 1207 / 18,  # task means 60, 82.5 and 176/3: (360 + 495 + 352) / 6 = 1207 / 6, over 3
    # best before the end: 75 and 90; (75 - 30) + (90 - 96) = 45 - 6 = 39, over T - 1 = 2
    "forgetting": 19.5,
    "forgetting_first": 8.0,  # (60 - 30) + (90 - 96) + (50 - 50) = 30 - 6 + 0 = 24, over T = 3
    "forgetting_best": 15.0,  # best of all rows: 75, 96, 50; 45 + 0 + 0 = 45, over T = 3
    "BWT": -12.0,  # (30 - 60) + (96 - 90) = -30 + 6 = -24, over T - 1 = 2
    "plasticity": 200 / 3,  # (60 + 90 + 50) / 3
    "AUC": 73.0,  # trapezoids (60 + 85) / 2 = 72.5 and (85 + 62) / 2 = 73.5, over T - 1 = 2
}
BASE_METRIC_VALUES = {
    "base": 30.0,
    "novel": 68.4,  # (20 * 96 + 30 * 50) / 50 = 3420 / 50
    "harmonic": 41.707,  # 2 * 30 * 68.4 / 98.4 = 4104 / 98.4
    "base_novel_mean": 49.2,  # (30 + 68.4) / 2
}
MATRIX_METRICS = {**METRICS, **MORE_METRICS}


@pytest.mark.parametrize("name", MATRIX_METRICS)
def test_three_tasks_by_hand(name: str) -> None:
    assert MATRIX_METRICS[name](A, N) == pytest.approx(BY_HAND[name], abs=1e-12)


def test_base_and_novel_classes_by_hand() -> None:
    values = {name: metric(A, N) for name, metric in BASE_METRICS.items()}
    assert values == pytest.approx(BASE_METRIC_VALUES, abs=5e-4)
    assert harmonic_mean([[0.0], [0.0, 0.0]], [1, 1]) == 0
    # of two first tasks: (10 * 30 + 20 * 96) / 30 = 2220 / 30
    assert base_accuracy(A, N, 2) == pytest.approx(74.0) and novel_accuracy(A, N, 2) == 50.0
    assert [has_base_task(sizes) for sizes in ([4, 2, 2], [4, 3, 3], [10])] == [True, False, False]


def test_all_metrics_by_name() -> None:
    assert all_metrics(A, N) == pytest.approx(BY_HAND, abs=1e-12)


def test_seen_accuracy_by_hand() -> None:
    assert [seen_accuracy(A, N, t) for t in range(3)] == pytest.approx([60.0, 85.0, 62.0])


def test_seen_accuracy_is_share_of_correct_answers() -> None:
    # 3 of 4 and 1 of 6 correct: 4 of 10.
    assert seen_accuracy([[0.0], [75.0, 100 / 6]], [4, 6], 1) == pytest.approx(40.0)


def test_metrics_of_one_task() -> None:
    assert all_metrics([[37.5]], [8]) == {
        "A_N": 37.5,
        "Avg": 37.5,
        "FAA": 37.5,
        "Abar": 37.5,
        "forgetting": 0.0,
        "forgetting_first": 0.0,
        "forgetting_best": 0.0,
        "BWT": 0.0,
        "plasticity": 37.5,
        "AUC": 37.5,
    }


def test_forward_transfer_by_hand() -> None:
    """Compare with chance among four classes, 25: (45 - 25 + 15 - 25) / 2 = 5."""
    assert forward_transfer([45.0, 15.0], 4) == 5.0
    assert forward_transfer([45.0, None, 15.0, None], 4) == 5.0
    assert math.isnan(forward_transfer([None], 4)) and math.isnan(forward_transfer([], 4))


def test_intransigence_by_hand() -> None:
    """Joint training reaches 60, 95 and 80 on the new tasks: (0 + 5 + 30) / 3."""
    joint = [[60.0], [99.0, 95.0], [90.0, 90.0, 80.0]]
    assert intransigence(A, joint, N) == pytest.approx(35 / 3)
    assert intransigence(A, joint, [10, 0, 30]) == pytest.approx(15.0)
    assert intransigence(A, A, N) == 0.0


def test_forgetting_variants_can_differ_in_sign() -> None:
    # The old task gains at the end: 40 -> 70. Chaudhry et al.: 40 - 70 = -30;
    # with the last row among the best: 0.
    a = [[40.0], [70.0, 50.0]]
    assert METRICS["forgetting"](a, [1, 1]) == -30.0
    assert METRICS["forgetting_best"](a, [1, 1]) == 0.0
    assert METRICS["forgetting_first"](a, [1, 1]) == -15.0
    assert METRICS["BWT"](a, [1, 1]) == 30.0


property_settings = settings(max_examples=200, deadline=None)
percent = st.floats(0, 100)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float]]:
    tasks = draw(st.integers(1, 5))
    return [[draw(percent) for _ in range(t + 1)] for t in range(tasks)]


counts = st.lists(st.integers(1, 500), min_size=5, max_size=5)
EPS = 1e-9


@property_settings
@given(matrices(), counts)
def test_metrics_stay_in_range(a: list[list[float]], n: list[int]) -> None:
    metrics = all_metrics(a, n[: len(a)])
    for name in ("A_N", "Avg", "FAA", "Abar", "plasticity", "AUC"):
        assert -EPS <= metrics[name] <= 100 + EPS
    for name in ("forgetting", "forgetting_first", "BWT"):
        assert -100 - EPS <= metrics[name] <= 100 + EPS
    assert -EPS <= metrics["forgetting_best"] <= 100 + EPS
    assert min(a[-1]) - EPS <= metrics["A_N"] <= max(a[-1]) + EPS
    assert seen_accuracy(a, n[: len(a)], 0) == pytest.approx(a[0][0])


@property_settings
@given(matrices(), st.integers(1, 500))
def test_pooled_and_task_means_agree_for_equal_test_sizes(a: list[list[float]], each: int) -> None:
    metrics = all_metrics(a, [each] * len(a))
    assert metrics["A_N"] == pytest.approx(metrics["FAA"], abs=EPS)
    assert metrics["Avg"] == pytest.approx(metrics["Abar"], abs=EPS)


@property_settings
@given(matrices(), counts)
def test_forgetting_first_is_bounded_by_other_variants(a: list[list[float]], n: list[int]) -> None:
    """Check forgetting_first <= forgetting <= forgetting_best, up to a factor.

    Means over T tasks are multiplied by T / (T - 1).
    """
    metrics, tasks = all_metrics(a, n[: len(a)]), len(a)
    if tasks > 1:
        factor = tasks / (tasks - 1)
        assert factor * metrics["forgetting_first"] <= metrics["forgetting"] + EPS
        assert metrics["forgetting"] <= factor * metrics["forgetting_best"] + EPS
        assert metrics["BWT"] == pytest.approx(-factor * metrics["forgetting_first"], abs=EPS)


@property_settings
@given(st.lists(percent, min_size=1, max_size=5), counts)
def test_constant_accuracies_have_no_forgetting(learned: list[float], n: list[int]) -> None:
    """Measure no forgetting with any metric if accuracies stay constant."""
    a = [learned[: t + 1] for t in range(len(learned))]
    metrics = all_metrics(a, n[: len(a)])
    for name in ("forgetting", "forgetting_first", "forgetting_best", "BWT"):
        assert metrics[name] == 0.0


@property_settings
@given(matrices(), counts)
def test_rising_accuracies_have_no_forgetting(a: list[list[float]], n: list[int]) -> None:
    rising = [[max(a[s][i] for s in range(i, t + 1)) for i in range(t + 1)] for t in range(len(a))]
    metrics = all_metrics(rising, n[: len(a)])
    assert metrics["forgetting"] <= 0
    assert metrics["forgetting_first"] <= 0 <= metrics["BWT"]
    assert metrics["forgetting_best"] == 0.0


@property_settings
@given(matrices(), counts, percent)
def test_seen_accuracy_ignores_later_rows(a: list[list[float]], n: list[int], last: float) -> None:
    longer = [*a, [last] * (len(a) + 1)]
    sizes = [*n[: len(a)], 7]
    assert [seen_accuracy(longer, sizes, t) for t in range(len(a))] == [
        seen_accuracy(a, n[: len(a)], t) for t in range(len(a))
    ]


def test_metrics_page_matches_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    values = {
        name: float(value)
        for name, value in re.findall(r"^\| (\w+) \|.*\| (-?[\d.]+) \|$", page, flags=re.MULTILINE)
        if name in {**BY_HAND, **BASE_METRIC_VALUES}
    }
    assert values == pytest.approx({**BY_HAND, **BASE_METRIC_VALUES}, abs=5e-4)
    rows = [
        re.findall(r"[\d.]+", line)[1:] for line in page.splitlines() if re.match(r"\| \d \|", line)
    ]
    assert [[float(v) for v in row] for row in rows] == A


def test_tasks_without_test_images_by_hand() -> None:
    """Skip a task without test images in all metrics but Avg and AUC.

    The matrix above has such a task before the last: only Avg and AUC have one more A_t.
    """
    nan = float("nan")
    a = [[60.0], [75.0, 90.0], [45.0, 90.0, nan], [30.0, 96.0, nan, 50.0]]
    assert all_metrics(a, [10, 20, 0, 30]) == pytest.approx(
        {
            "A_N": 62.0,
            "Avg": 70.5,  # A_2 = (450 + 1800) / 30 = 75: (60 + 85 + 75 + 62) / 4 = 282 / 4
            "FAA": 176 / 3,
            "Abar": 1612 / 24,  # one more task mean, (45 + 90) / 2 = 67.5: (1207 + 405) / 6, over 4
            "forgetting": 19.5,  # best before the end: still 75 and 90
            "forgetting_first": 8.0,
            "forgetting_best": 15.0,
            "BWT": -12.0,
            "plasticity": 200 / 3,
            "AUC": 221 / 3,  # 60, 85, 75, 62: 72.5 + 80 + 68.5 = 221, over T - 1 = 3
        },
        abs=1e-12,
    )
