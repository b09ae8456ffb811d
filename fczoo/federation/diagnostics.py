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
from fczoo.core.files import encode_json, naming, read_lines
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Diagnoses, Evidence, Task
from fczoo.federation.batches import view_batches
from fczoo.federation.evaluate import predictions
from fczoo.federation.world import World
from fczoo.functional.gaussians import class_sums

FILE = "diagnostics.jsonl"
BATCH = 64  # test images that are looked at together
KINDS = {
    "clients": "client, accuracy on the task's test images and evenness of its answers: 1 = "
    "as spread over its classes as can be, 0 = one class",
    "confusion": "matrix[i][j]: share of task i's test images that are taken for a class of task j",
    "first round": "clients, as above, before anything is merged in a task; distance: of two "
    "clients' class prototypes on the test images, mean over pairs and classes, relative to their "
    "length",
    "client drift": "by trained prefix, mean over clients of |theirs - server's| / |server's| "
    "after local training",
    "task drift": "by trained prefix, |end of the task - its beginning| / |beginning|; prototypes "
    "included",
}
"""What is recorded of every method; ``Diagnoses.diagnose`` adds a method's own kinds."""


def check_diagnostics(method: Method) -> None:
    """Raise FczooError if a method has neither uploads nor a global model to diagnose."""
    if method.training().own_models:
        raise FczooError(
            f"--diagnostics is about uploads and the global model, and {method.name} has "
            "neither; leave one of the two out"
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
        self, world: World, method: Method, state: Tree, payloads: Sequence[Payload], ctx: Context
    ) -> None:
        """Handle the uploads of a round, which started from ``state``, before they are merged."""
        task, prefixes = ctx.task, tuple(method.training().optims)
        if ctx.round not in (0, ctx.rounds - 1):
            return
        local = [{**state, **p.only(*prefixes)} for p in payloads]
        rows = self._client_rows(world, method, payloads, local, task)
        if ctx.round == 0:
            distance = _prototype_distance(world, method, local, task)
            self._write(task, "first round", clients=rows, distance=distance)
        if ctx.round < ctx.rounds - 1:
            return
        self._write(task, "clients", clients=rows)
        drift = {}
        for prefix in prefixes:
            movements = [
                movement(select(state, prefix), select(client_state, prefix))
                for client_state in local
            ]
            drift[prefix] = sum(movements) / len(movements)
        self._write(task, "client drift", **{"by prefix": drift})
        self._ask(world, method, state, payloads, task)

    def _client_rows(
        self,
        world: World,
        method: Method,
        payloads: Sequence[Payload],
        local: Sequence[Tree],
        task: Task,
    ) -> list[dict[str, Any]]:
        """Return accuracy, evenness and counts of each client's predictions on test images."""
        rows = []
        for payload, client_state in zip(payloads, local, strict=True):
            answers, labels = _predictions(world, method, client_state, task, task)
            rows.append(
                {
                    "client": payload.client,
                    "accuracy": 100 * float((answers == labels).float().mean()),
                    "entropy": evenness(answers, task),
                    "histogram": histogram(answers, task.stop),
                }
            )
        return rows

    def on_task_end(self, world: World, method: Method, state: Tree, task: Task) -> None:
        """Handle the end of a task."""
        if not task.returning:  # else no answer names a task
            self._write(task, "confusion", matrix=self._confusion(world, method, state, task))
        if self.begin:
            prefixes = method.training().optims
            drift = {p: movement(select(self.begin, p), select(state, p)) for p in prefixes}
            self._write(task, "task drift", **{"by prefix": drift})
        self._ask(world, method, state, (), task)

    def _confusion(
        self, world: World, method: Method, state: Tree, task: Task
    ) -> list[list[float]]:
        """Return per task the shares of its test images predicted as classes of each task."""
        starts, matrix = torch.tensor([t.start for t in world.stream.tasks[1 : task.index + 1]]), []
        for test_task in world.stream.tasks[: task.index + 1]:
            answers, _ = _predictions(world, method, state, task, test_task)
            taken_for = histogram(torch.bucketize(answers, starts, right=True), task.index + 1)
            matrix.append([n / max(len(answers), 1) for n in taken_for])
        return matrix

    @torch.inference_mode()
    def _ask(
        self, world: World, method: Method, state: Tree, payloads: Sequence[Payload], task: Task
    ) -> None:
        """Record the diagnostics of the method itself."""
        if isinstance(method, Diagnoses):

            def images(seen: Task) -> Iterator[Batch]:
                index = torch.from_numpy(world.stream.positions(world.stream.test, seen))
                return view_batches(method, world.test, index, BATCH)

            evidence = Evidence(task, world.stream.tasks, state, payloads, world.backbone, images)
            for kind, finding in method.diagnose(evidence).items():
                self._write(task, kind, **finding)

    def _write(self, task: Task, kind: str, **content: Any) -> None:
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(encode_json({"task": task.index, "kind": kind, **content}) + "\n")


def _predictions(
    world: World, method: Method, state: Tree, now: Task, task: Task
) -> tuple[Tensor, Tensor]:
    """Return predictions and labels of one task's test images after task ``now``."""
    index = torch.from_numpy(world.stream.positions(world.stream.test, task))
    return predictions(method, world, state, index, now, BATCH)


@torch.inference_mode()
def _prototype_distance(
    world: World, method: Method, local: Sequence[Tree], task: Task
) -> float | None:
    """Return the distance of clients' class prototypes on a task's test images.

    The result is None for a single client, or without test images.

    A prototype is the mean feature of a class. Distances are means over pairs of clients and over
    classes, divided by the mean length of a prototype.
    """
    index = torch.from_numpy(world.stream.positions(world.stream.test, task))
    if len(local) < 2 or not len(index):
        return None
    prototypes = []
    for tree in local:
        count, total = torch.zeros(()), torch.zeros(())
        for batch in view_batches(method, world.test, index, BATCH):
            features = method.features(world.backbone, tree, batch).double()
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


def evenness(answers: Tensor, task: Task) -> float:
    """Return H(p) / log C over a task's C classes.

    p is the share of each class among the predictions of one of them; 0 without such a prediction.
    """
    counts = torch.bincount(answers, minlength=task.stop)[task.start : task.stop].double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum() / torch.tensor(max(task.size, 2)).log()) + 0.0


def movement(before: Tree, after: Tree) -> float:
    """Return |after - before| / |before| over all tensors together; infinite from zero."""
    change = sum(float((after[k].double() - before[k].double()).square().sum()) for k in before)
    size = sum(float(before[k].double().square().sum()) for k in before)
    return (change / size) ** 0.5 if size else float("inf") if change else 0.0


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run; empty if it has none."""
    return read_lines(folder / FILE, "list of diagnostics")
