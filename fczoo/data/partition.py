"""The split of the training images over clients and tasks: made once per run, saved and hashed."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from fczoo.core.errors import FczooError, log_place
from fczoo.core.files import encode_json, write_safely
from fczoo.core.options import flag
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Partitioner, split_images
from fczoo.data.client_index import ClientGrowth, ClientIndex
from fczoo.data.dataset import rows
from fczoo.data.partition_file import (
    FORMAT,
    PartitionFile,
    check_class_order,
    partition_path,
    read_partition_file,
)
from fczoo.data.stream import Stream

log = logging.getLogger("fczoo")

INDICES = "indices"  # spec of a partition of other software
HASHED_AS = {"dirichlet:1": "dirichlet:1.0"}
"""Canonical specs that are hashed in an earlier spelling, so that known hashes stay valid."""


@dataclass(frozen=True, repr=False)
class Partition:
    """Positions in the data set's original training part, per task and client."""

    dataset: str
    spec: str  # partitioner, e.g. dirichlet:0.5
    seed: int
    class_order: tuple[int, ...]
    tasks: tuple[ClientIndex, ...]  # [task][client] -> original positions, ascending
    # clients that have joined by each task; empty: all take part from the start
    joined: tuple[int, ...] = ()
    # variants of the stream with their seed; see ``stream_variants``
    variants: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert plain lists of arrays."""
        object.__setattr__(self, "tasks", tuple(map(ClientIndex.of, self.tasks)))

    def __repr__(self) -> str:
        images, sizes = int(self.counts().sum()), f"{len(self.tasks)} tasks, {self.clients} clients"
        return (
            f"<Partition {self.spec}, seed {self.seed}, {self.sha256[:8]}: {images} images, "
            f"{sizes}>"
        )

    def _repr_html_(self) -> str:
        rows = [[f"task {t + 1}", *row] for t, row in enumerate(self.counts().tolist())]
        head = ["images", *(f"client {k}" for k in range(self.clients))]
        return f"<p>{repr(self)[1:-1]}</p>{tabulate(rows, head, tablefmt='html')}"

    @property
    def clients(self) -> int:
        return len(self.tasks[0])

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the content; equal hashes mean equal splits."""
        return self.sha256_as(HASHED_AS.get(self.spec, self.spec))

    def has_hash(self, sha256: str, spec: str) -> bool:
        """Return whether a hash belongs to this partition.

        Earlier versions recorded and hashed the spec as the user typed it.

        Args:
            sha256: Hash to compare.
            spec: Spec that was recorded with the hash.
        """
        return sha256 in (self.sha256, self.sha256_as(spec))

    def sha256_as(self, spec: str) -> str:
        """Return the hash that the partition has with another spelling of its spec.

        Args:
            spec: Spelling of the spec.
        """
        digest = hashlib.sha256()
        for text in self._json(dict(sorted({**self._metadata(), "spec": spec}.items()))):
            digest.update(text.encode())
        return digest.hexdigest()

    def client_count(self, task: int) -> int:
        """Return the number of clients that have joined by a task.

        Args:
            task: Number of the task, from 0.
        """
        return self.joined[task] if self.joined else self.clients

    def counts(self) -> np.ndarray:
        """Return the number of images, [tasks, clients]."""
        return np.array([task.sizes for task in self.tasks])

    def save(self, path: Path) -> None:
        """Write the partition as JSON, with its hash.

        Args:
            path: File to write.
        """
        head = {"format": FORMAT, "sha256": self.sha256, **self._metadata()}
        write_safely(path, (text.encode() for text in chain(self._json(head), "\n")))

    def _metadata(self) -> dict[str, Any]:
        """Return the settings of the partition as plain values, without positions."""
        about = {
            "dataset": self.dataset,
            "spec": self.spec,
            "seed": self.seed,
            "class_order": self.class_order,
        }
        later = {"joined": self.joined, "variants": dict(self.variants)}
        return about | {name: value for name, value in later.items() if value}

    def _json(self, head: dict[str, Any]) -> Iterator[str]:
        """Yield ``head`` and the tasks as JSON, task by task.

        The whole text would take many times as much memory.
        """
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
    restore: Callable[[Partition], Partition] | None = None,
) -> Partition:
    """Split every task of a stream over clients.

    Args:
        stream: Data set divided into tasks.
        spec: Partitioner such as ``dirichlet:0.5``, or ``file:PATH`` to load a saved partition or
            each client's indices, which ``read_partition_file`` describes.
        clients: Number of clients at the start; see ``ClientGrowth`` for the others.
        seed: Seed of the split.
        joining: Number of clients that join at every later task.
        transition: Share of the earlier clients that get data of a new task.
        partitioner: Partitioner that ``spec`` names, if it was created before.
        restore: Function that converts a saved partition to one of tasks.

    Raises:
        FczooError: The split is impossible, or the file belongs to other data.
    """
    population, tasks = ClientGrowth(clients, joining, transition), range(len(stream.tasks))
    client_counts = tuple(map(population.client_count, tasks)) if joining else ()
    if spec.startswith("file:"):
        path = partition_path(spec)
        file = read_partition_file(path)
        if isinstance(file, list):
            partition = _partition_of_indices(file, path, stream)
        else:
            partition = _partition(file, path)
            partition = restore(partition) if restore else partition
        return _check_saved_partition(
            partition, stream, population.client_count(len(tasks) - 1), client_counts
        )
    partitioner = partitioner or PARTITIONERS.create(spec)
    if getattr(partitioner, "needs_groups", False) and stream.groups is None:
        raise FczooError(
            f"--partition {spec} needs the domain, hospital, writer or user of each image, which "
            f"{stream.name} does not have; use another partition, or add groups with --hf-columns "
            "group=NAME (data sets hf:) or groups.csv (image folders)"
        )
    if getattr(partitioner, "scope", "task") == "dataset":
        if joining or transition < 1:
            problem = f"{spec} splits the whole data set at once"
            raise FczooError(
                f"{problem}, which needs the same clients in every task; leave out --joining and "
                "--transition, or set scope=task if the partitioner has this option"
            )
        parts = _partition_whole(stream, partitioner, clients, seed)
    else:
        parts = _partition_tasks(stream, partitioner, population, seed)
    spec, order = PARTITIONERS.canonical(spec), stream.class_order
    return Partition(stream.name, spec, seed, order, parts, client_counts, stream.variants)


def _check_parts(
    partitioner: Partitioner, parts: list[np.ndarray], images: int, clients: int
) -> None:
    """Check that a partitioner returned a split.

    Raises:
        FczooError: It returned something else; the message has the partitioner's name.
    """
    name = getattr(partitioner, "name", type(partitioner).__name__)
    fault = ""
    if len(parts) != clients:
        fault = f"{len(parts)} lists for {clients} clients"
    elif not all(
        np.issubdtype(np.asarray(part).dtype, np.integer) or not len(part) for part in parts
    ):
        fault = "something other than lists of positions"
    else:
        positions = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        disjoint_positions = positions if getattr(partitioner, "disjoint", True) else None
        if positions.size and (positions.min() < 0 or positions.max() >= images):
            position = positions.max() if positions.max() >= images else positions.min()
            fault = f"position {position} for {images} images"
        elif any(
            len(np.unique(part)) < len(part)
            for part in ([disjoint_positions] if disjoint_positions is not None else parts)
        ):
            fault = "the same image twice"
    if fault:
        raise FczooError(f"partitioner {name} returned {fault}; fix its code, see fczoo.testing")


def _partition_tasks(
    stream: Stream, partitioner: Partitioner, population: ClientGrowth, seed: int
) -> tuple[ClientIndex, ...]:
    tasks, total_clients = [], population.client_count(len(stream.tasks) - 1)
    for task in stream.tasks:
        images, receivers = (
            stream.positions(stream.train, task),
            population.receivers(task.index, seed),
        )
        if not len(receivers):
            problem = f"no client gets data of task {task.index + 1}"
            raise FczooError(f"{problem}; raise --transition, --clients or --joining")
        if len(images) < len(receivers) and getattr(partitioner, "disjoint", True):
            problem = (
                f"task {task.index + 1} has {len(images)} training images for {len(receivers)} "
                "clients"
            )
            raise FczooError(f"{problem}; lower --clients or --tasks")
        labels = stream.train.labels[images] - task.start
        rng, groups = numpy_stream("partition", seed, task.index), rows(stream.groups, images)
        with log_place(f"task {task.index + 1}"):
            parts = split_images(partitioner, labels, len(receivers), rng, groups)
        _check_parts(partitioner, parts, len(labels), len(receivers))
        client_images = [images[:0]] * total_clients
        for client, part in zip(receivers, parts, strict=True):
            client_images[client] = images[part]
        tasks.append(
            ClientIndex(np.sort(stream.train_index[positions]) for positions in client_images)
        )
    return tuple(tasks)


def _partition_whole(
    stream: Stream, partitioner: Partitioner, clients: int, seed: int
) -> tuple[ClientIndex, ...]:
    if len(stream.train_index) < clients:
        problem = (
            f"{stream.name} has {len(stream.train_index)} training images for {clients} clients"
        )
        raise FczooError(f"{problem}; lower --clients")
    labels, rng = stream.train.labels, numpy_stream("partition", seed)
    parts = split_images(partitioner, labels, clients, rng, stream.groups)
    _check_parts(partitioner, parts, len(labels), clients)
    return _divide_into_tasks(stream, parts)


def _divide_into_tasks(stream: Stream, parts: list[np.ndarray]) -> tuple[ClientIndex, ...]:
    """Divide each client's positions in the stream into tasks."""
    tasks = []
    for task in stream.tasks:
        images = stream.positions(stream.train, task)
        tasks.append(
            ClientIndex(stream.train_index[np.intersect1d(part, images)] for part in parts)
        )
    return tuple(tasks)


def load_partition(path: Path) -> Partition:
    """Read a saved partition and return it with the canonical spelling of its spec.

    Args:
        path: File of ``Partition.save``.

    Raises:
        FczooError: The file is missing, malformed or does not match its hash.
    """
    file = read_partition_file(path)
    if isinstance(file, list):
        problem = f"{path} is not a valid partition file: it does not divide the images by task"
        advice = f"run fczoo bench --partition file:{path}, and load the partition.json of the run"
        raise FczooError(f"{problem}; {advice}")
    return _partition(file, path)


def _partition(file: PartitionFile, path: Path) -> Partition:
    tasks = tuple(
        ClientIndex(np.array(c, dtype=np.int64) for c in clients) for clients in file.tasks
    )
    order, client_counts = tuple(file.class_order), tuple(file.joined)
    spec = PARTITIONERS.canonical(file.spec)
    partition = Partition(file.dataset, spec, file.seed, order, tasks, client_counts, file.variants)
    if not partition.has_hash(file.sha256, file.spec):
        raise FczooError(
            f"{path} is not a valid partition file: its content does not match its sha256; save "
            "one with a bench run"
        )
    return partition


def _partition_of_indices(indices: list[np.ndarray], path: Path, stream: Stream) -> Partition:
    """Create the partition from each client's positions in the whole training part.

    Raises:
        FczooError: A position is not that of a training image of the run.
    """
    for client, positions in enumerate(indices):
        if len(unknown := np.setdiff1d(positions, stream.train_index)):
            problem = (
                f"{path} gives client {client} the index {unknown[0]}, which is not a training "
                f"image of this run of {stream.name}"
            )
            raise FczooError(
                f"{problem} (indices 0 to {stream.train_index[-1]}); remove test images from the "
                "file, and do not give --train-per-class"
            )
    parts = [np.searchsorted(stream.train_index, positions) for positions in indices]
    parts_by_task, order = _divide_into_tasks(stream, parts), stream.class_order
    return Partition(stream.name, INDICES, 0, order, parts_by_task, variants=stream.variants)


def _variant_flags(source: Partition | Stream) -> str:
    """Return the variants of the stream as command-line options, for messages."""
    values = {"partition_seed" if k == "seed" else k: v for k, v in source.variants.items()}
    return " ".join(f"{flag(name)} {value:g}" for name, value in values.items()) or "none"


def _check_saved_partition(
    partition: Partition, stream: Stream, clients: int, joined: tuple[int, ...]
) -> Partition:
    """Return the saved partition if it fits the run.

    Raises:
        FczooError: It does not fit; the message names the first difference.
    """
    differences = (
        ("data set", partition.dataset, stream.name),
        ("number of tasks", len(partition.tasks), len(stream.tasks)),
        ("number of clients", partition.clients, clients),
        ("number of clients joining at each task", partition.joined, joined),
        ("variant of the stream", _variant_flags(partition), _variant_flags(stream)),
    )
    for aspect, file_value, run_value in differences:
        if file_value != run_value:
            problem = f"another {aspect} ({file_value}) than this run ({run_value})"
            raise FczooError(f"the saved partition has {problem}; use the options of its run")
    check_class_order(partition.class_order, stream.class_order)
    orphan_count = shared_count = 0
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        positions, owners = np.unique(parts.positions, return_counts=True)
        if not len(positions):
            raise FczooError(
                f"the saved partition gives no client an image of task {task.index + 1}"
            )
        images = stream.train_index[stream.positions(stream.train, task)]
        if not np.isin(positions, images).all():
            problem = (
                f"the saved partition names images that task {task.index + 1} of this run does "
                "not have"
            )
            raise FczooError(f"{problem}; use the same --train-per-class and --task-order")
        orphan_count, shared_count = (
            orphan_count + len(images) - len(positions),
            shared_count + int((owners > 1).sum()),
        )
    total = len(stream.train_index)
    if orphan_count:
        log.warning(
            "the saved partition gives %d of %d training images to no client", orphan_count, total
        )
    if shared_count:
        log.warning(
            "the saved partition gives %d of %d training images to several clients",
            shared_count,
            total,
        )
    return partition
