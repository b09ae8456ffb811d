"""Tasks, and partitioners of their images: the part of the contract that needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

NUMBERS = ("index", "start", "stop", "classes", "count")  # fields of a task in files


@dataclass(frozen=True)
class Task:
    """A range of labels; classes are numbered in order of arrival.

    Tasks of a class-incremental run bring new classes. Tasks of a domain-incremental run are the
    domains of the data set: each has all classes, starting at label 0. If clients are in different
    tasks at the same time, the tasks of the run are stages: each has all classes that any client
    has reached.
    """

    index: int
    start: int  # first class of the task
    stop: int  # one past the last class seen so far
    classes: int  # over all tasks
    count: int  # number of tasks
    # original label of each class of the run; known only in ``begin_task``, and not in records
    class_order: tuple[int, ...] = field(default=(), compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        """Return the number of its classes."""
        return self.stop - self.start

    @classmethod
    def of_record(cls, record: Mapping[str, int]) -> "Task":
        """Create the task of a record.

        Args:
            record: Numbers of the task, as files and requests store them.
        """
        return cls(*(record[name] for name in NUMBERS))

    @property
    def record(self) -> dict[str, int]:
        """Return the numbers of the task, as files and requests store them."""
        return {name: getattr(self, name) for name in NUMBERS}

    @property
    def returning(self) -> bool:
        """Return whether its labels occurred before.

        Such a task is a later domain of the same classes, or a stage.
        """
        return self.index > 0 and self.start == 0


class Partitioner(Protocol):
    """Pure function from the labels of one task to one array of positions per client.

    Attributes change the call. With ``scope = "dataset"`` it gets all labels at once, before they
    are divided into tasks. With ``disjoint = False`` it may give an image to several clients or to
    none. With ``needs_groups = True`` it also gets the keyword ``groups``: int64 [N], the number of
    the domain, hospital, writer or user of each image; data sets without groups are rejected.
    """

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, /
    ) -> list[np.ndarray]: ...


def split_images(
    partitioner: Partitioner,
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Split images over clients; the partitioner gets their groups only if it needs them.

    Args:
        partitioner: Partitioner to call.
        labels: Labels [N].
        clients: Number of clients.
        rng: Source of random numbers.
        groups: int64 [N], the group of each image; required if the partitioner needs groups.

    Returns:
        Positions of the images of each client.
    """
    if not getattr(partitioner, "needs_groups", False):
        return partitioner(labels, clients, rng)
    with_groups: Callable[..., list[np.ndarray]] = partitioner
    return with_groups(labels, clients, rng, groups=groups)
