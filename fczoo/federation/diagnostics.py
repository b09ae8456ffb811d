"""Numbers that explain a result: predictions of clients, confusion of tasks, drift of tensors.

They are computed from what every run has: the state, the uploads of the first and the last round of
a task, and the test images. ``diagnostics.jsonl`` has one JSON object per line: ``task``, ``kind``
and the fields that ``KINDS`` describes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, name_file_in_errors, read_lines
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Diagnoses, Evidence, Task
from fczoo.federation.batches import view_batches
from fczoo.federation.evaluate import predictions
from fczoo.federation.scenario import Scenario
from fczoo.functional.gaussians import class_sums

FILE = "diagnostics.jsonl"
BATCH = 64  # test images per forward
KINDS = {
    "clients": "per client: accuracy on the test images of the task, in percent; entropy of its "
    "predictions over the classes of the task, from 0 (one class) to 1 (each class equally often); "
    "histogram of its predictions over all classes so far",
    "confusion": "matrix[i][j]: share of the test images of task i that are predicted as a class "
    "of task j",
    "first round": "the values of `clients` before the first merge of a task, and the distance "
    "between the class means that the models of two clients compute on the test images, as mean "
    "over pairs of clients and classes, divided by the mean norm of a class mean",
    "client drift": "by group of trained tensors: |client - server| / |server| after local "
    "training, as mean over clients",
    "task drift": "by group of trained tensors and prototypes: |end - start| / |start| of a task",
}
"""Diagnostics of every method, by kind; ``Diagnoses.diagnose`` adds a method's own kinds."""


def check_diagnostics(method: Method) -> None:
    """Raise FczooError if a method has neither uploads nor a global model to diagnose."""
    if method.training().own_models:
        raise FczooError(
            "--diagnostics needs uploads and a global model, but "
            f"{method.name} has neither; leave out --diagnostics or this method"
        )


class Probe:
    """Writer of the diagnostics of one run."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.begin: Tree = {}

    def resume(self, size: int, begin: Tree) -> None:
        """Resume after ``size`` bytes of records in a task that started with tensors ``begin``."""
        with self.path.open("ab") as file:
            file.truncate(size)
        self.begin = begin

    def size(self) -> int:
        """Return the bytes of records so far."""
        return self.path.stat().st_size

    def on_task_start(self, method: Method, state: Tree) -> None:
        """Handle the start of a task."""
        self.begin = select(state, *method.training().optims)

    def on_round(
        self,
        scenario: Scenario,
        method: Method,
        state: Tree,
        payloads: Sequence[Payload],
        ctx: Context,
    ) -> None:
        """Handle the uploads of a round, which started from ``state``, before they are merged."""
        task, prefixes = ctx.task, tuple(method.training().optims)
        if ctx.round not in (0, ctx.rounds - 1):
            return
        local = [{**state, **p.only(*prefixes)} for p in payloads]
        rows = self._client_rows(scenario, method, payloads, local, task)
        if ctx.round == 0:
            distance = _prototype_distance(scenario, method, local, task)
            self._write(task, "first round", clients=rows, distance=distance)
        if ctx.round < ctx.rounds - 1:
            return
        self._write(task, "clients", clients=rows)
        drift = {}
        for prefix in prefixes:
            changes = [
                relative_change(select(state, prefix), select(client_state, prefix))
                for client_state in local
            ]
            drift[prefix] = sum(changes) / len(changes)
        self._write(task, "client drift", **{"by prefix": drift})
        self._write_method_diagnostics(scenario, method, state, payloads, task)

    def _client_rows(
        self,
        scenario: Scenario,
        method: Method,
        payloads: Sequence[Payload],
        local: Sequence[Tree],
        task: Task,
    ) -> list[dict[str, Any]]:
        """Return accuracy, entropy and counts of each client's predictions on test images."""
        rows = []
        for payload, client_state in zip(payloads, local, strict=True):
            predicted, labels = _predictions(scenario, method, client_state, task, task)
            rows.append(
                {
                    "client": payload.client,
                    "accuracy": 100 * float((predicted == labels).float().mean()),
                    "entropy": normalised_entropy(predicted, task),
                    "histogram": histogram(predicted, task.stop),
                }
            )
        return rows

    def on_task_end(self, scenario: Scenario, method: Method, state: Tree, task: Task) -> None:
        """Handle the end of a task."""
        if not task.returning:  # else no answer names a task
            self._write(task, "confusion", matrix=self._confusion(scenario, method, state, task))
        if self.begin:
            prefixes = method.training().optims
            drift = {p: relative_change(select(self.begin, p), select(state, p)) for p in prefixes}
            self._write(task, "task drift", **{"by prefix": drift})
        self._write_method_diagnostics(scenario, method, state, (), task)

    def _confusion(
        self, scenario: Scenario, method: Method, state: Tree, task: Task
    ) -> list[list[float]]:
        """Return per task the shares of its test images predicted as classes of each task."""
        starts, matrix = (
            torch.tensor([t.start for t in scenario.stream.tasks[1 : task.index + 1]]),
            [],
        )
        for test_task in scenario.stream.tasks[: task.index + 1]:
            predicted, _ = _predictions(scenario, method, state, task, test_task)
            predicted_task_counts = histogram(
                torch.bucketize(predicted, starts, right=True), task.index + 1
            )
            matrix.append([n / max(len(predicted), 1) for n in predicted_task_counts])
        return matrix

    @torch.inference_mode()
    def _write_method_diagnostics(
        self,
        scenario: Scenario,
        method: Method,
        state: Tree,
        payloads: Sequence[Payload],
        task: Task,
    ) -> None:
        """Record the diagnostics of the method itself."""
        if isinstance(method, Diagnoses):

            def images(image_task: Task) -> Iterator[Batch]:
                index = torch.from_numpy(
                    scenario.stream.positions(scenario.stream.test, image_task)
                )
                return view_batches(method, scenario.test, index, BATCH)

            evidence = Evidence(
                task, scenario.stream.tasks, state, payloads, scenario.backbone, images
            )
            for kind, content in method.diagnose(evidence).items():
                self._write(task, kind, **content)

    def _write(self, task: Task, kind: str, **content: Any) -> None:
        with name_file_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(encode_json({"task": task.index, "kind": kind, **content}) + "\n")


def _predictions(
    scenario: Scenario, method: Method, state: Tree, current_task: Task, task: Task
) -> tuple[Tensor, Tensor]:
    """Return predictions and labels of one task's test images after task ``current_task``."""
    index = torch.from_numpy(scenario.stream.positions(scenario.stream.test, task))
    return predictions(method, scenario, state, index, current_task, BATCH)


@torch.inference_mode()
def _prototype_distance(
    scenario: Scenario, method: Method, local: Sequence[Tree], task: Task
) -> float | None:
    """Return the distance of clients' class prototypes on a task's test images.

    The result is None for a single client, or without test images.

    A prototype is the mean feature of a class. Distances are means over pairs of clients and over
    classes, divided by the mean length of a prototype.
    """
    index = torch.from_numpy(scenario.stream.positions(scenario.stream.test, task))
    if len(local) < 2 or not len(index):
        return None
    prototypes = []
    for tree in local:
        count, total = torch.zeros(()), torch.zeros(())
        for batch in view_batches(method, scenario.test, index, BATCH):
            features = method.features(scenario.backbone, tree, batch).double()
            sums = class_sums(features, batch, task)
            count, total = count + sums["class.count"].cpu(), total + sums["class.sum"].cpu()
        prototypes.append(total / count.clamp(min=1)[:, None])
    return pair_distance(torch.stack(prototypes))


def pair_distance(prototypes: Tensor) -> float:
    """Return the mean distance of two clients' prototypes, relative to the prototypes' length.

    ``prototypes`` are [clients, classes, D].
    """
    number = len(prototypes)
    distances = torch.cdist(prototypes.transpose(0, 1), prototypes.transpose(0, 1))
    mean = distances.sum((1, 2)).mean() / (number * (number - 1))
    return float(mean / prototypes.norm(dim=-1).mean())


def histogram(values: Tensor, size: int) -> list[int]:
    """Count how often each of 0 .. size - 1 occurs."""
    return torch.bincount(values, minlength=size).tolist()


def normalised_entropy(predicted: Tensor, task: Task) -> float:
    """Return H(p) / log C over a task's C classes.

    p is the share of each class among the predictions of one of them; 0 without such a prediction.
    """
    counts = torch.bincount(predicted, minlength=task.stop)[task.start : task.stop].double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum() / torch.tensor(max(task.size, 2)).log()) + 0.0


def relative_change(before: Tree, after: Tree) -> float:
    """Return |after - before| / |before| over all tensors together; infinite from zero."""
    change = sum(float((after[k].double() - before[k].double()).square().sum()) for k in before)
    size = sum(float(before[k].double().square().sum()) for k in before)
    return (change / size) ** 0.5 if size else float("inf") if change else 0.0


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run; empty if it has none."""
    return read_lines(folder / FILE, "list of diagnostics")
