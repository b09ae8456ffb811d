"""Test metrics of clients in different tasks, by hand."""

import math
import re
from pathlib import Path

import pytest

from fczoo.core.transfer_metrics import REFERENCE_METRICS, TRANSFER_METRICS

# Client 0 has a task in stage 0 and one in stages 1 and 2, client 1 one in stages 0 and 1 and one
# in stage 2.
TASKS = [[0, 0, 0], [1, 0, 1], [0, 1, 2], [1, 2, 2]]
B = [[80.0, 60.0], [70.0, 62.0, 90.0], [72.0, 58.0, 80.0, 50.0]]
LOCAL = [[75.0, 55.0], [60.0, 50.0, 80.0], [60.0, 48.0, 70.0, 60.0]]


def test_three_stages_by_hand() -> None:
    """Compute the example of the page on metrics.

    Stage means are 70, 74 and 65. Drops from the best before are 10, -2 and 0 in stage 1, and 8, 4,
    10 and 0 in stage 2. After its end the first task changed by -10 and -8, the second by -4.
    """
    values = {name: metric(TASKS, B) for name, metric in TRANSFER_METRICS.items()}
    assert values == pytest.approx(
        {
            "client_task_final": 65.0,
            "client_task_accuracy": 209 / 3,
            "client_task_forgetting": (0 + 8 / 3 + 22 / 4) / 3,
            "client_task_backward": (-10 + (-8 - 4) / 2) / 2,
        }
    )


def test_transfer_against_local_training_by_hand() -> None:
    """Compare with local training.

    Two tasks end 5 and 12 points above it. Of the last two, one ends 10 points above and one 10
    points below.
    """
    values = {name: metric(TASKS, B, LOCAL) for name, metric in REFERENCE_METRICS.items()}
    assert values["client_task_forward"] == pytest.approx((5 + 12 + 0) / 3)
    assert values["client_task_total"] == pytest.approx((5 + 12 + 0 - 10 - 6) / 3)


def test_missing_accuracies_are_ignored() -> None:
    rows = [[None, 60.0], [None, 50.0]]
    tasks = [[0, 0, 0], [1, 0, 0]]
    values = {name: metric(tasks, rows) for name, metric in TRANSFER_METRICS.items()}
    assert values["client_task_final"] == 50.0 and values["client_task_accuracy"] == 55.0
    assert values["client_task_forgetting"] == 5.0 and values["client_task_backward"] == -10.0
    local = [[10.0, None], [10.0, None]]
    assert all(math.isnan(metric(tasks, rows, local)) for metric in REFERENCE_METRICS.values())


def test_one_stage_has_zero_backward_transfer() -> None:
    assert TRANSFER_METRICS["client_task_backward"]([[0, 0, 0]], [[50.0]]) == 0.0


def test_metrics_page_matches_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    shown = dict(
        re.findall(r"^\| (client_task_\w+) \|.*\| (-?[\d.]+) \|$", page, flags=re.MULTILINE)
    )
    values = {name: metric(TASKS, B) for name, metric in TRANSFER_METRICS.items()}
    values |= {name: metric(TASKS, B, LOCAL) for name, metric in REFERENCE_METRICS.items()}
    assert {name: float(value) for name, value in shown.items()} == pytest.approx(values, abs=5e-4)
    rows = re.findall(r"^\| stage \d \|(.*)\|$", page, flags=re.MULTILINE)
    assert [[float(v) for v in re.findall(r"\d+", row)] for row in rows] == B
