"""Numbers that explain a result: what clients predict, which tasks are confused, how trained tensors move.

All of it is computed from what a run has anyway: the state, the uploads of the last round of a task, the
test images. A record is one JSON object a line in ``diagnostics.jsonl``: ``task``, ``kind`` and what
``KINDS`` says of the kind.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fczoo.core.files import encode_json, naming, read_lines
from fczoo.core.method import Diagnoses, Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Evidence, Task
from fczoo.federation.batches import view_batches
from fczoo.federation.evaluate import predictions
from fczoo.federation.world import World

FILE = "diagnostics.jsonl"
BATCH = 64  # test images that are looked at together
KINDS = {
    "clients": "client, accuracy on the task's test images and evenness of its answers: 1 = as spread over "
    "its classes as can be, 0 = one class",
    "confusion": "matrix[i][j]: share of task i's test images that are taken for a class of task j",
    "client drift": "by trained prefix, mean over clients of |theirs - server's| / |server's| after local "
    "training",
    "task drift": "by trained prefix, |end of the task - its beginning| / |beginning|; prototypes included",
}
"""What is recorded of every method; ``Diagnoses.diagnose`` adds a method's own kinds."""


class Probe:
    """Writes the diagnostics of one run."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.begin: Tree = {}

    def resume(self, size: int, begin: Tree) -> None:
        """Go on after ``size`` bytes of records, in a task that began with the tensors ``begin``."""
        with self.path.open("ab") as file:
            file.truncate(size)
        self.begin = begin

    def size(self) -> int:
        """Bytes of records so far."""
        return self.path.stat().st_size

    def begun(self, method: Method, state: Tree) -> None:
        """A task begins."""
        self.begin = select(state, *method.training().optims)

    def trained(
        self, world: World, method: Method, state: Tree, payloads: Sequence[Payload], task: Task
    ) -> None:
        """Clients have trained for the last time in a task; ``state`` is what they started from."""
        prefixes = tuple(method.training().optims)
        local = [{**state, **p.only(*prefixes)} for p in payloads]
        rows = []
        for payload, own in zip(payloads, local, strict=True):
            answers, labels = _predictions(world, method, own, task, task)
            rows.append(
                {
                    "client": payload.client,
                    "accuracy": 100 * float((answers == labels).float().mean()),
                    "entropy": evenness(answers, task),
                    "histogram": histogram(answers, task.stop),
                }
            )
        self._write(task, "clients", clients=rows)
        drift = {}
        for prefix in prefixes:
            moved = [movement(select(state, prefix), select(own, prefix)) for own in local]
            drift[prefix] = sum(moved) / len(moved)
        self._write(task, "client drift", **{"by prefix": drift})
        self._ask(world, method, state, payloads, task)

    def learned(self, world: World, method: Method, state: Tree, task: Task) -> None:
        """A task is over."""
        if not task.returning:  # else no answer names a task
            self._write(task, "confusion", matrix=self._confusion(world, method, state, task))
        if self.begin:
            prefixes = method.training().optims
            drift = {p: movement(select(self.begin, p), select(state, p)) for p in prefixes}
            self._write(task, "task drift", **{"by prefix": drift})
        self._ask(world, method, state, (), task)

    def _confusion(self, world: World, method: Method, state: Tree, task: Task) -> list[list[float]]:
        """Part of each task's test images, row by row, that is taken for classes of each task."""
        starts, matrix = torch.tensor([t.start for t in world.stream.tasks[1 : task.index + 1]]), []
        for seen in world.stream.tasks[: task.index + 1]:
            answers, _ = _predictions(world, method, state, task, seen)
            taken_for = histogram(torch.bucketize(answers, starts, right=True), task.index + 1)
            matrix.append([n / max(len(answers), 1) for n in taken_for])
        return matrix

    @torch.inference_mode()
    def _ask(
        self, world: World, method: Method, state: Tree, payloads: Sequence[Payload], task: Task
    ) -> None:
        """What the method says of itself."""
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


def _predictions(world: World, method: Method, state: Tree, now: Task, task: Task) -> tuple[Tensor, Tensor]:
    """Answers and labels of one task's test images after task ``now``."""
    index = torch.from_numpy(world.stream.positions(world.stream.test, task))
    return predictions(method, world, state, index, now, BATCH)


def histogram(values: Tensor, size: int) -> list[int]:
    """How often each of 0 .. size - 1 occurs."""
    return torch.bincount(values, minlength=size).tolist()


def evenness(answers: Tensor, task: Task) -> float:
    """H(p) / log C over the task's C classes, p the share of each among the answers that name one of them.

    0 where no answer does.
    """
    counts = torch.bincount(answers, minlength=task.stop)[task.start : task.stop].double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum() / torch.tensor(max(task.size, 2)).log()) + 0.0


def movement(before: Tree, after: Tree) -> float:
    """|after - before| / |before| over all tensors together; infinite where nothing was there before."""
    change = sum(float((after[k].double() - before[k].double()).square().sum()) for k in before)
    size = sum(float(before[k].double().square().sum()) for k in before)
    return (change / size) ** 0.5 if size else float("inf") if change else 0.0


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none where it ran without."""
    return read_lines(folder / FILE, "list of diagnostics")
