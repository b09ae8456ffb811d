"""The split of the training images over clients and tasks: made once for a run, saved and hashed."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, encode_json, read_json, typed, write_safely
from fczoo.core.place import at
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Partitioner
from fczoo.data.owned import Owned
from fczoo.data.population import Population
from fczoo.data.stream import Stream

log = logging.getLogger("fczoo")

FORMAT = "fczoo-partition-1"
HASHED_AS = {"dirichlet:1": "dirichlet:1.0"}
"""Canonical specs that are hashed in an earlier spelling, so that known hashes stay valid."""


@dataclass(frozen=True, repr=False)
class Partition:
    """Positions in the data set's original training part, per task and client."""

    dataset: str
    spec: str  # partitioner, e.g. dirichlet:0.5
    seed: int
    class_order: tuple[int, ...]
    tasks: tuple[Owned, ...]  # [task][client] -> original positions, ascending
    joined: tuple[int, ...] = ()  # clients that have joined by each task; empty: all are there from the start

    def __post_init__(self) -> None:
        """Plain lists of arrays are taken, too."""
        object.__setattr__(self, "tasks", tuple(map(Owned.of, self.tasks)))

    def __repr__(self) -> str:
        images, sizes = int(self.counts().sum()), f"{len(self.tasks)} tasks, {self.clients} clients"
        return f"<Partition {self.spec}, seed {self.seed}, {self.sha256[:8]}: {images} images, {sizes}>"

    def _repr_html_(self) -> str:
        rows = [[f"task {t + 1}", *row] for t, row in enumerate(self.counts().tolist())]
        head = ["images", *(f"client {k}" for k in range(self.clients))]
        return f"<p>{repr(self)[1:-1]}</p>{tabulate(rows, head, tablefmt='html')}"

    @property
    def clients(self) -> int:
        return len(self.tasks[0])

    @cached_property
    def sha256(self) -> str:
        """Hash of the content: equal hashes mean equal splits."""
        return self.sha256_as(HASHED_AS.get(self.spec, self.spec))

    def has_hash(self, sha256: str, spec: str) -> bool:
        """Return whether a hash belongs to this partition, whose spec was recorded as ``spec``.

        Earlier versions recorded and hashed the spec as the user typed it.
        """
        return sha256 in (self.sha256, self.sha256_as(spec))

    def sha256_as(self, spec: str) -> str:
        """Return the hash that the partition has with another spelling of its spec."""
        digest = hashlib.sha256()
        for text in self._json(dict(sorted({**self._about(), "spec": spec}.items()))):
            digest.update(text.encode())
        return digest.hexdigest()

    def present(self, task: int) -> int:
        """Clients that have joined by the task of this index: the first so many."""
        return self.joined[task] if self.joined else self.clients

    def counts(self) -> np.ndarray:
        """Number of images, [tasks, clients]."""
        return np.array([task.sizes for task in self.tasks])

    def save(self, path: Path) -> None:
        """Write the partition as JSON, with its hash."""
        head = {"format": FORMAT, "sha256": self.sha256, **self._about()}
        write_safely(path, (text.encode() for text in chain(self._json(head), "\n")))

    def _about(self) -> dict[str, Any]:
        """What the partition is of, without who owns what."""
        about = {
            "dataset": self.dataset,
            "spec": self.spec,
            "seed": self.seed,
            "class_order": self.class_order,
        }
        return {**about, "joined": self.joined} if self.joined else about

    def _json(self, head: dict[str, Any]) -> Iterator[str]:
        """``head`` and the tasks as JSON, task by task: as text they are many times as large as here."""
        yield f'{encode_json(head)[:-1]}, "tasks": ['
        for number, task in enumerate(self.tasks):
            yield f"{', ' if number else ''}{encode_json([part.tolist() for part in task])}"
        yield "]}"


def make_partition(
    stream: Stream,
    spec: str,
    clients: int,
    seed: int = 0,
    joining: int = 0,
    transition: float = 1.0,
    partitioner: Partitioner | None = None,
    read: Callable[[Path], Partition] | None = None,
) -> Partition:
    """Split every task of a stream by a partitioner spec such as ``dirichlet:0.5``, or load ``file:PATH``.

    ``clients`` are those at the start; see ``Population`` for the others. ``partitioner`` is what ``spec``
    means, where that has been read before. ``read`` takes the place of ``load_partition``. Raises FczooError
    when the split is impossible or the file belongs to other data.
    """
    population, tasks = Population(clients, joining, transition), range(len(stream.tasks))
    joined = tuple(map(population.joined, tasks)) if joining else ()
    if spec.startswith("file:"):
        saved = (read or load_partition)(Path(spec[5:]))
        return _matching(saved, stream, population.joined(len(tasks) - 1), joined)
    partitioner = partitioner or PARTITIONERS.create(spec)
    if getattr(partitioner, "scope", "task") == "dataset":
        if joining or transition < 1:
            problem = f"{spec} splits the whole data set at once"
            raise FczooError(f"{problem}, which needs the same clients in every task; take scope=task")
        parts = _split_whole(stream, partitioner, clients, seed)
    else:
        parts = _split_tasks(stream, partitioner, population, seed)
    return Partition(stream.name, PARTITIONERS.canonical(spec), seed, stream.class_order, parts, joined)


def _check_parts(partitioner: Partitioner, parts: list[np.ndarray], images: int, clients: int) -> None:
    """Raise FczooError, calling the partitioner by its name, where it returns what is no split."""
    name = getattr(partitioner, "name", type(partitioner).__name__)
    fault = ""
    if len(parts) != clients:
        fault = f"{len(parts)} lists for {clients} clients"
    elif not all(np.issubdtype(np.asarray(part).dtype, np.integer) or not len(part) for part in parts):
        fault = "what is no list of positions"
    else:
        given = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        owned = given if getattr(partitioner, "disjoint", True) else None
        if given.size and (given.min() < 0 or given.max() >= images):
            fault = f"position {given.max() if given.max() >= images else given.min()} of {images} images"
        elif any(len(np.unique(part)) < len(part) for part in ([owned] if owned is not None else parts)):
            fault = "the same image twice"
    if fault:
        raise FczooError(f"partitioner {name} returned {fault}; mend its code, see fczoo.testing")


def _split_tasks(
    stream: Stream, partitioner: Partitioner, population: Population, seed: int
) -> tuple[Owned, ...]:
    tasks, everyone = [], population.joined(len(stream.tasks) - 1)
    for task in stream.tasks:
        images, receivers = stream.positions(stream.train, task), population.receivers(task.index, seed)
        if not len(receivers):
            problem = f"no client gets data of task {task.index + 1}"
            raise FczooError(f"{problem}; raise --transition, --clients or --joining")
        if len(images) < len(receivers) and getattr(partitioner, "disjoint", True):
            problem = f"task {task.index + 1} has {len(images)} training images for {len(receivers)} clients"
            raise FczooError(f"{problem}; lower --clients or --tasks")
        labels = stream.train.labels[images] - task.start
        with at(f"task {task.index + 1}"):
            parts = partitioner(labels, len(receivers), numpy_stream("partition", seed, task.index))
        _check_parts(partitioner, parts, len(labels), len(receivers))
        owned = [images[:0]] * everyone
        for client, part in zip(receivers, parts, strict=True):
            owned[client] = images[part]
        tasks.append(Owned(np.sort(stream.train_index[positions]) for positions in owned))
    return tuple(tasks)


def _split_whole(stream: Stream, partitioner: Partitioner, clients: int, seed: int) -> tuple[Owned, ...]:
    if len(stream.train_index) < clients:
        problem = f"{stream.name} has {len(stream.train_index)} training images for {clients} clients"
        raise FczooError(f"{problem}; lower --clients")
    parts = partitioner(stream.train.labels, clients, numpy_stream("partition", seed))
    _check_parts(partitioner, parts, len(stream.train.labels), clients)
    tasks = []
    for task in stream.tasks:
        images = stream.positions(stream.train, task)
        tasks.append(Owned(stream.train_index[np.intersect1d(part, images)] for part in parts))
    return tuple(tasks)


class _PartitionFile(msgspec.Struct):
    """A partition file's content."""

    format: str
    sha256: str
    dataset: str
    spec: str
    seed: Count
    class_order: list[int]
    tasks: list[list[list[Count]]]
    joined: list[Count] = []


def load_partition(path: Path) -> Partition:
    """Read a saved partition and return it with the canonical spelling of its spec.

    Raises FczooError when it is missing, malformed or does not match its hash.
    """
    content = read_json(path, "partition file")
    try:
        return _partition(typed(content, _PartitionFile))
    except ValueError as error:
        raise FczooError(f"{path} is no valid partition file: {error}; save one with a bench run") from error


def _partition(file: _PartitionFile) -> Partition:
    """Raises ValueError where parts of the file contradict each other."""
    if file.format != FORMAT:
        raise ValueError(f"format is {file.format!r}, expected {FORMAT!r}")
    if not file.tasks or len({len(clients) for clients in file.tasks}) != 1 or not file.tasks[0]:
        raise ValueError("tasks: all must list the same clients")
    if file.joined and len(file.joined) != len(file.tasks):
        raise ValueError("joined: it must count clients at each task")
    for clients, number in zip(file.tasks, file.joined, strict=False):
        if not 0 < number <= len(clients):
            raise ValueError("joined: it must count clients at each task")
        if any(clients[number:]):
            raise ValueError("joined: a client owns images before it has joined")
    tasks = tuple(Owned(np.array(c, dtype=np.int64) for c in clients) for clients in file.tasks)
    order, joined = tuple(file.class_order), tuple(file.joined)
    spec = PARTITIONERS.canonical(file.spec)
    partition = Partition(file.dataset, spec, file.seed, order, tasks, joined)
    if not partition.has_hash(file.sha256, file.spec):
        raise ValueError("its content does not match its sha256")
    return partition


def _matching(partition: Partition, stream: Stream, clients: int, joined: tuple[int, ...]) -> Partition:
    """The saved partition, if it fits the run. Raises FczooError naming the first difference."""
    differences = (
        ("data set", partition.dataset, stream.name),
        ("class order", partition.class_order, stream.class_order),
        ("number of tasks", len(partition.tasks), len(stream.tasks)),
        ("number of clients", partition.clients, clients),
        ("number of clients joining at each task", partition.joined, joined),
    )
    for what, saved, ours in differences:
        if saved != ours:
            raise FczooError(f"the saved partition has another {what} than this run: {saved} against {ours}")
    nobody = several = 0
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        owned, owners = np.unique(parts.positions, return_counts=True)
        if not len(owned):
            raise FczooError(f"the saved partition gives nobody an image of task {task.index + 1}")
        images = stream.train_index[stream.positions(stream.train, task)]
        if not np.isin(owned, images).all():
            problem = f"the saved partition names images that task {task.index + 1} of this run does not have"
            raise FczooError(f"{problem}; use the same --train-per-class and --task-order")
        nobody, several = nobody + len(images) - len(owned), several + int((owners > 1).sum())
    total = len(stream.train_index)
    if nobody:
        log.warning("the saved partition leaves %d of %d training images to nobody", nobody, total)
    if several:
        log.warning("the saved partition gives %d of %d training images to several clients", several, total)
    return partition
