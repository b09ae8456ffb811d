"""Who owns what: one split of the training images over clients and tasks, made once a run, saved and hashed."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .data import Stream
from .errors import FczooError
from .registry import PARTITIONERS
from .seeds import numpy_stream

FORMAT = "fczoo-partition-1"


@dataclass(frozen=True)
class Partition:
    """Positions in the data set's original training part, per task and client."""

    dataset: str
    spec: str  # partitioner, e.g. dirichlet:0.5
    seed: int
    class_order: tuple[int, ...]
    tasks: tuple[tuple[np.ndarray, ...], ...]  # [task][client] -> original positions, ascending

    @property
    def clients(self) -> int:
        return len(self.tasks[0])

    @cached_property
    def sha256(self) -> str:
        """Hash of the content: equal hashes mean equal splits."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def counts(self) -> np.ndarray:
        """Number of images, [tasks, clients]."""
        return np.array([[len(c) for c in task] for task in self.tasks])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, "sha256": self.sha256, **self._content()}) + "\n")

    def _content(self) -> dict[str, Any]:
        tasks = [[c.tolist() for c in task] for task in self.tasks]
        return {"dataset": self.dataset, "spec": self.spec, "seed": self.seed, "class_order": self.class_order, "tasks": tasks}


def make_partition(stream: Stream, spec: str, clients: int, seed: int = 0) -> Partition:
    """Split every task of a stream by a partitioner spec such as ``dirichlet:0.5``, or load ``file:PATH``.

    Raises FczooError when the split is impossible or the file belongs to other data.
    """
    if spec.startswith("file:"):
        return _matching(load_partition(Path(spec[5:])), stream, clients)
    partitioner = PARTITIONERS.create(spec)
    if clients < 1:
        raise FczooError(f"{clients} clients cannot hold data; choose --clients 1 or more")
    tasks = []
    for task in stream.tasks:
        here = stream.positions(stream.train, task)
        if len(here) < clients:
            raise FczooError(f"task {task.index + 1} has {len(here)} training images for {clients} clients; lower --clients or --tasks")
        parts = partitioner(stream.train.labels[here] - task.start, clients, numpy_stream("partition", seed, task.index))
        tasks.append(tuple(np.sort(stream.train_index[here[p]]) for p in parts))
    return Partition(stream.name, spec, seed, stream.class_order, tuple(tasks))


def load_partition(path: Path) -> Partition:
    """Read a saved partition. Raises FczooError when it is missing, malformed or does not match its own hash."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        tasks = tuple(tuple(np.array(c, dtype=np.int64).reshape(-1) for c in task) for task in content["tasks"])
        if not tasks or len({len(t) for t in tasks}) != 1 or not tasks[0]:
            raise ValueError("tasks must all list the same clients")
        partition = Partition(content["dataset"], content["spec"], int(content["seed"]), tuple(map(int, content["class_order"])), tasks)
        if partition.sha256 != content["sha256"]:
            raise ValueError("its content does not match its sha256")
    except FileNotFoundError:
        raise FczooError(f"no partition file at {path}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FczooError(f"{path} is no valid partition file: {error}; save one with a bench run") from error
    return partition


def _matching(partition: Partition, stream: Stream, clients: int) -> Partition:
    want = (stream.name, stream.class_order, len(stream.tasks), clients)
    have = (partition.dataset, partition.class_order, len(partition.tasks), partition.clients)
    for what, ours, theirs in zip(("data set", "class order", "number of tasks", "number of clients"), want, have, strict=True):
        if ours != theirs:
            raise FczooError(f"the saved partition has another {what} than this run: {theirs} against {ours}")
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        owned = np.concatenate(parts)
        if not len(owned):
            raise FczooError(f"the saved partition gives nobody an image of task {task.index + 1}")
        known = stream.train_index[stream.positions(stream.train, task)]
        if not np.isin(owned, known).all():
            raise FczooError(f"the saved partition names images that task {task.index + 1} of this run does not have; use the same --train-per-class")
    return partition
