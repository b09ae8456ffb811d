"""Numbers that explain a result: what clients predict, which tasks are confused, how trained tensors move.

All of it is computed from what a run has anyway: the state, the uploads of the last round of a task, the test images.
A record is one JSON object a line in ``diagnostics.jsonl``: ``task``, ``kind`` and what ``KINDS`` says of the kind.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fczoo.aggregators.prototypes import prototype_weights
from fczoo.core.files import read_lines
from fczoo.core.method import Method, overrides
from fczoo.core.tree import Tree, select
from fczoo.core.types import Task
from fczoo.federation.evaluate import batches, predictions
from fczoo.federation.world import World

FILE = "diagnostics.jsonl"
BATCH = 64  # test images that are looked at together
KINDS = {
    "clients": "client, accuracy on the task's test images and evenness of its answers: 1 = as spread over its classes as can be, 0 = one class",
    "confusion": "matrix[i][j]: share of task i's test images that are taken for a class of task j",
    "client drift": "by trained prefix, mean over clients of |theirs - server's| / |server's| after local training",
    "task drift": "by trained prefix, |end of the task - its beginning| / |beginning|; prototypes included",
    "lora": "matrix[i][j]: mean over layers of the cosine between the updates B A of tasks i and j",
    "choices": "share[i][p]: share of prompt p of the pool in all choices of task i's test images",
    "reweight": "weights[k][c] of client k's prototype of class c, and its share of the class's images",
}


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
        self.begin = select(state, *method.optims()) if method.optims() else {}

    def trained(
        self, world: World, method: Method, state: Tree, payloads: Sequence[Tree], task: Task
    ) -> None:
        """Clients have trained for the last time in a task; ``state`` is what they started from."""
        prefixes = tuple(method.optims())
        local = [{**state, **select(p, *prefixes)} for p in payloads]
        rows = []
        for payload, own in zip(payloads, local, strict=True):
            answers, labels = _predictions(world, method, own, task, task)
            right = 100 * float((answers == labels).float().mean())
            rows.append(
                {
                    "client": int(payload["client"]),
                    "accuracy": right,
                    "entropy": evenness(answers, task),
                    "histogram": histogram(answers, task.stop),
                }
            )
        self._write(task, "clients", clients=rows)
        drift = {
            p: sum(movement(select(state, p), select(own, p)) for own in local) / len(local) for p in prefixes
        }
        self._write(task, "client drift", **{"by prefix": drift})
        if {"prototype", "class.mean", "class.count"} <= set(payloads[0]) and getattr(
            method, "reweight", "distance"
        ) != "average":
            prototypes, means, counts = (
                torch.stack([p[k] for p in payloads]) for k in ("prototype", "class.mean", "class.count")
            )
            weights = prototype_weights(
                prototypes,
                means,
                counts > 0,
                getattr(method, "temperature", 0.2),
                squared=getattr(method, "reweight", "") == "squared",
            )
            share = counts / counts.sum(0).clamp(min=1)
            self._write(
                task,
                "reweight",
                clients=[int(p["client"]) for p in payloads],
                weights=weights.tolist(),
                share=share.tolist(),
            )

    def learned(self, world: World, method: Method, state: Tree, task: Task) -> None:
        """A task is over."""
        starts = torch.tensor([t.start for t in world.stream.tasks[1 : task.index + 1]])
        matrix = []
        for seen in world.stream.tasks[: task.index + 1]:
            answers, _ = _predictions(world, method, state, task, seen)
            matrix.append(
                [
                    n / max(len(answers), 1)
                    for n in histogram(torch.bucketize(answers, starts, right=True), task.index + 1)
                ]
            )
        self._write(task, "confusion", matrix=matrix)
        if overrides(method, "choices"):
            shares = [
                prompt_shares(world, method, state, task, seen)
                for seen in world.stream.tasks[: task.index + 1]
            ]
            self._write(task, "choices", share=shares)
        if self.begin:
            self._write(
                task,
                "task drift",
                **{
                    "by prefix": {
                        p: movement(select(self.begin, p), select(state, p)) for p in method.optims()
                    }
                },
            )
        if any(k.startswith("past.") and k.endswith(".a") for k in state):
            self._write(task, "lora", matrix=lora_cosines(state).tolist())

    def _write(self, task: Task, kind: str, **content: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"task": task.index, "kind": kind, **content}) + "\n")


def _predictions(world: World, method: Method, state: Tree, now: Task, task: Task) -> tuple[Tensor, Tensor]:
    """Answers and labels of one task's test images after task ``now``."""
    return predictions(
        method,
        world.test,
        state,
        torch.from_numpy(world.stream.positions(world.stream.test, task)),
        now,
        BATCH,
    )


@torch.inference_mode()
def prompt_shares(world: World, method: Method, state: Tree, now: Task, task: Task) -> list[float]:
    """Share of each prompt of the pool in the choices of one task's test images after task ``now``; empty without a pool."""
    index = torch.from_numpy(world.stream.positions(world.stream.test, task))
    found = [
        method.choices(world.backbone, state, batch, now)
        for batch in batches(method, world.test, index, BATCH)
    ]
    counts = [c.sum(0) for c in found if c is not None]
    return (torch.stack(counts).sum(0) / torch.stack(counts).sum()).tolist() if counts else []


def histogram(values: Tensor, size: int) -> list[int]:
    """How often each of 0 .. size - 1 occurs."""
    return torch.bincount(values, minlength=size).tolist()


def evenness(answers: Tensor, task: Task) -> float:
    """H(p) / log C over the task's C classes, p the share of each among the answers that name one of them; 0 when none does."""
    counts = torch.bincount(answers, minlength=task.stop)[task.start : task.stop].double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum() / torch.tensor(max(task.size, 2)).log()) + 0.0


def movement(before: Tree, after: Tree) -> float:
    """|after - before| / |before| over all tensors together; infinite where nothing was there before."""
    change = sum(float((after[k].double() - before[k].double()).square().sum()) for k in before)
    size = sum(float(before[k].double().square().sum()) for k in before)
    return (change / size) ** 0.5 if size else float("inf") if change else 0.0


def lora_cosines(state: Tree) -> Tensor:
    """[t, t] from ``past.X.a`` [t-1, r, D], ``past.X.b`` and the current ``lora.X.a`` [r, D], ``lora.X.b``; 0 where an update is 0."""
    layers = [k[len("lora.") : -2] for k in state if k.startswith("lora.") and k.endswith(".a")]
    cosines = []
    for layer in layers:
        down, up = (
            torch.cat([state[f"past.{layer}.{end}"], state[f"lora.{layer}.{end}"][None]]).double()
            for end in "ab"
        )
        updates = torch.nn.functional.normalize((up @ down).flatten(1), dim=1)
        cosines.append(updates @ updates.mT)
    return torch.stack(cosines).mean(0).cpu()


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none where it ran without."""
    return read_lines(folder / FILE, "list of diagnostics")
