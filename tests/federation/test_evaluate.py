"""The pass over the test images after a task, and its values in a result."""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fczoo import Method, Training, Tree
from fczoo.core.class_metrics import confusion_matrix
from fczoo.core.errors import FczooError
from fczoo.core.registry import METHODS, create_method
from fczoo.federation.evaluate import accuracy_row, evaluate
from fczoo.federation.result import Result, check_result, metrics_of, read_result, write_result
from fczoo.federation.scenario import Scenario
from fczoo.testing.toy_benchmark import TASKS, TEST, small_method, toy_bench

SCORES = {
    *("afc", "afcl", "fecam", "fedclm", "fedcof", "fedlda", "fedncm", "fedproto", "fedridge"),
    *("icarl", "pilora", "podnet", "ranpac", "stsa", "stsae"),
}


@dataclass(frozen=True)
class ShiftByOne(Method):
    """Predict the next class, modulo the classes seen, then the class itself, then the rest."""

    name = "shifted"

    def training(self) -> Training:
        return Training(inputs=["images"])

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {"w": torch.zeros(1)}

    def predict(self, backbone, state, batch, task) -> Tensor:
        batches[task.index] += 1
        images[task.index] += len(batch.y)
        logits = torch.zeros(len(batch.y), task.stop, dtype=torch.float64)
        logits.scatter_(1, batch.y[:, None], 1.0)
        return logits.scatter_(1, ((batch.y + 1) % task.stop)[:, None], 2.0)


batches: Counter[int] = Counter()
images: Counter[int] = Counter()


def test_values_of_one_pass_by_hand() -> None:
    """Compare the values of a method that is never right.

    With the task known, the last class of each task is right after the last task. Class 2 is taken
    for 3 and class 4 for 5, which are in the next task. Class 6 is taken for 0.
    """
    batches.clear()
    images.clear()
    result = toy_bench().run(ShiftByOne())
    assert images == {0: 3 * TEST, 1: 5 * TEST, 2: 7 * TEST}  # one forward per image
    assert batches == {0: 1, 1: 1, 2: 1}  # the tasks share a batch of at most 64
    assert result.accuracy == [[0.0], [0.0, 0.0], [0.0, 0.0, 0.0]]
    assert result.task_aware[2] == pytest.approx([100 / 3, 50.0, 50.0])
    assert result.task_aware[0] == [0.0]  # among three classes the next of class 2 is class 0
    assert result.top5 == [100.0] * 3
    assert result.class_accuracy == [[0.0] * 3, [0.0] * 5, [0.0] * 7]
    assert result.confusion == [[c, (c + 1) % 7, TEST] for c in range(7)]
    assert result.next_accuracy == [None] * 3 and "FWT" not in result.metrics
    claimed = [math.e**2 / (math.e**2 + math.e + rest) for rest in (1, 3, 5)]
    assert result.calibration == pytest.approx([100 * c for c in claimed])
    assert result.metrics["task_aware"] == pytest.approx(100 * 3 / 7)
    assert result.metrics["ECE"] == pytest.approx(100 * claimed[2])


def test_evaluation_matches_accuracy_row() -> None:
    bench, task = toy_bench(), TASKS[2]
    run = bench.start(small_method("fedavg"))
    list(run)
    evaluation = evaluate(run.method, bench, run.models, task, 4)
    assert evaluation.accuracy == run.result.accuracy[2]
    assert evaluation.accuracy == accuracy_row(run.method, bench, run.models, task, 4)
    matrix = confusion_matrix(evaluation.confusion, 7)
    for test_task, accuracy in zip(TASKS, evaluation.accuracy, strict=True):
        right = matrix.diagonal()[test_task.start : test_task.stop].sum()
        assert accuracy == pytest.approx(100 * right / (TEST * test_task.size))
    assert all(a >= b for a, b in zip(evaluation.task_aware, evaluation.accuracy, strict=True))


def test_domains_have_forward_transfer() -> None:
    """Test the second domain after the first; guessing among seven classes is the reference."""
    result = toy_bench(domains=True).run(small_method("fedncm"))
    assert 0 <= result.next_accuracy[0] <= 100 and result.next_accuracy[1] is None
    assert result.metrics["FWT"] == pytest.approx(result.next_accuracy[0] - 100 / 7)
    assert result.task_aware == result.accuracy  # each task has all classes


def test_forward_transfer_needs_classes_with_images(monkeypatch) -> None:
    bench = toy_bench(domains=True)
    run = bench.start(small_method("fedncm"))
    task = next(iter(run))
    assert run.result.next_accuracy[0] is not None
    monkeypatch.setattr(
        Scenario, "classes_with_images", lambda scenario, task: torch.arange(7) != 3
    )
    assert evaluate(run.method, bench, run.models, task, 4).next_accuracy is None


def test_methods_without_logits_are_listed() -> None:
    """List all methods without a calibration error, which declare it."""
    names = METHODS.names()
    assert {name for name in names if not create_method(name).training().gives_logits} == SCORES
    assert create_method("fedproto", infer="head").training().gives_logits
    assert create_method("icarl", infer="head").training().gives_logits
    assert create_method("fedlda", rule="lda").training().gives_logits


def sample() -> Result:
    """Return a result of two tasks with one and two classes, four and two images per class."""
    result = Result(
        "hgp", {}, {"rounds": 1}, 0, {"name": "vit"}, {"spec": "iid"}, [0, 1, 2], [1, 2], [4, 4]
    )
    result.accuracy, result.task_aware = [[100.0], [75.0, 50.0]], [[100.0], [100.0, 75.0]]
    result.next_accuracy, result.top5, result.calibration = [None, None], [100.0] * 2, [5.0, 8.0]
    result.class_accuracy = [[100.0], [75.0, 100.0, 0.0]]
    result.confusion = [[0, 0, 3], [0, 2, 1], [1, 1, 2], [2, 1, 2]]
    result.metrics = metrics_of(result)
    return result


def test_result_file_is_read_back(tmp_path: Path) -> None:
    path, result = tmp_path / "result.json", sample()
    write_result(path, result)
    assert repr(vars(read_result(path))) == repr(vars(result))
    assert result.metrics["task_aware"] == 87.5 and result.metrics["ECE"] == 8.0
    assert "  [0, 0, 3],\n" in path.read_text()  # one line per entry


def test_result_file_of_older_version_is_read(tmp_path: Path) -> None:
    path, result = tmp_path / "result.json", sample()
    new = (
        "task_aware",
        "next_accuracy",
        "top5",
        "calibration",
        "class_accuracy",
        "confusion",
        "client_accuracy",
    )
    content = {k: v for k, v in vars(result).items() if k not in new}
    content["metrics"] = {"A_N": 62.5, "Avg": 81.25}
    path.write_text(json.dumps(content))
    old = read_result(path)
    assert old.metrics["plasticity"] == 75.0 and "top5" not in old.metrics
    assert [getattr(old, name) for name in new] == [[]] * 7


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task_aware": [[100.0]]}, "lack a task"),
        ({"calibration": [5.0]}, "lack a task"),
        ({"top5": [100.0, 101.0]}, "top5: a value is not a percentage"),
        ({"confusion": [[0, 0, 3]]}, "confusion: it counts 3 images"),
        ({"confusion": [[0, 3, 8]]}, "confusion: an entry"),
        ({"confusion": [[0, 8]]}, "confusion: an entry"),
        ({"confusion": [[0, 0, 4], [1, 1, 4]]}, "confusion: 8 correct predictions"),
        ({"class_accuracy": [[100.0], [75.0, 100.0, 1.0]]}, "class_accuracy: a value is 1"),
        ({"client_accuracy": [9.0, 101.0]}, "client_accuracy: a value is not a percentage"),
        ({"metrics": {"ECE": 9.0}}, "metrics.ECE is 9, but its accuracies give 8"),
    ],
)
def test_inconsistent_results_are_rejected(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    result = replace(sample(), **changes)
    with pytest.raises(ValueError, match=says):
        check_result(result)
    write_result(tmp_path / "result.json", result)
    with pytest.raises(FczooError, match=says):
        read_result(tmp_path / "result.json")


def test_client_accuracy_follows_from_class_accuracy() -> None:
    """Weigh accuracies of classes by hand with the images of each client of the toy benchmark."""
    bench = toy_bench()
    result = bench.run(small_method("fedavg"))
    labels = dict(zip(bench.stream.train_index, bench.stream.train.labels, strict=True))
    by_hand = []
    for k in range(3):
        mix = Counter(labels[i] for task in bench.partition.tasks for i in task[k])
        weighted = sum(n * result.class_accuracy[-1][c] for c, n in mix.items())
        by_hand.append(weighted / mix.total())
    assert result.client_accuracy == pytest.approx(by_hand)
    assert result.metrics["client_worst"] == min(result.client_accuracy)
    assert result.metrics["client_mean"] == pytest.approx(sum(by_hand) / 3)


def test_image_of_two_stages_counts_once_per_client() -> None:
    bench = toy_bench()
    twice = replace(bench.partition, tasks=(bench.partition.tasks[0],) * 3)
    staged = replace(bench, partition=twice)
    owners, labels = staged.images_by_client(TASKS[2])
    assert Counter(owners.tolist()) == {0: 13, 1: 10, 2: 7}
    assert Counter(labels.tolist()) == {0: 10, 1: 10, 2: 10}
    assert len(bench.images_by_client(TASKS[1])[0]) == 50
    assert len(bench.images_by_client(TASKS[2])[0]) == 70
