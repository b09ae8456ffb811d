"""Heat maps of classes, clients and confusion, computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from fczoo.federation.result import read_result, write_result
from fczoo.reports.detail_figures import (
    class_confusion_map,
    class_map,
    client_map,
    confusion_map,
    personal_map,
)
from fczoo.reports.figures import figures
from fczoo.reports.runs import Experiment, read_experiments
from helpers_runs import write_run

# two tasks of five classes; class 0 is sometimes confused with class 7
RIGHT = [60.0] + [100.0] * 9


def recorded_experiment(folder: Path) -> Experiment:
    """Return runs of two methods; one has results per class and client."""
    write_run(folder, {"hgp": {0: 92.0, 1: 92.0}, "fedavg": {0: 50.0}})
    for seed in (0, 1):
        path = folder / "hgp" / f"seed{seed}" / "result.json"
        result = read_result(path)
        result.test_counts, result.accuracy = [25, 25], [[100.0], [92.0, 100.0]]
        result.task_aware, result.next_accuracy = [[100.0], [100.0, 100.0]], [None, None]
        result.top5, result.metrics = [100.0, 100.0], {}
        result.class_accuracy = [[100.0] * 5, RIGHT]
        result.confusion = [[0, 0, 3], [0, 7, 2], *([c, c, 5] for c in range(1, 10))]
        result.client_accuracy = [70.0 + 10 * seed, None, 90.0]
        result.personal_accuracy = [80.0, None, 90.0 + 5 * seed]
        write_result(path, result)
    return read_experiments([folder])[0]


def test_heat_maps_match_hand_computation(tmp_path: Path) -> None:
    """Average over seeds; leave a client without images empty."""
    experiment = recorded_experiment(tmp_path / "run")
    classes, clients = class_map(experiment), client_map(experiment)
    assert classes is not None and clients is not None
    assert classes.rows == clients.rows == ["hgp"]
    assert classes.values.tolist() == [RIGHT]
    assert clients.values[0, [0, 2]].tolist() == [75.0, 90.0] and np.isnan(clients.values[0, 1])
    assert clients.columns == ["0", "1", "2"]
    personal = personal_map(experiment)
    assert personal is not None and personal.values[0, [0, 2]].tolist() == [80.0, 92.5]
    lines = {line.label: line for line in experiment.lines}
    confusion = confusion_map(lines["hgp"])
    assert confusion is not None
    assert confusion.values == pytest.approx(np.array([[92.0, 8.0], [0.0, 100.0]]))
    classes_confused = class_confusion_map(lines["hgp"])
    expected = 100 * np.eye(10)
    expected[0, [0, 7]] = 60.0, 40.0  # of five images of class 0
    assert classes_confused is not None and classes_confused.values == pytest.approx(expected)
    assert confusion_map(lines["fedavg"]) is class_confusion_map(lines["fedavg"]) is None


def test_heat_maps_are_among_figures(tmp_path: Path) -> None:
    names = {figure.name for figure in figures(recorded_experiment(tmp_path / "run"))}
    expected = {"classes", "client accuracies", "personal accuracies"}
    expected |= {"confusion hgp", "confusion of classes hgp"}
    assert expected <= names
    plain = read_experiments([write_run(tmp_path / "plain", {"hgp": {0: 50.0}})])[0]
    names = {figure.name for figure in figures(plain)}
    assert not expected & names
