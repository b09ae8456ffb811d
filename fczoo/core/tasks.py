"""Tasks, and who splits their images over clients: what a data set needs of the contract, without torch."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Task:
    """Classes are numbered in order of arrival, so a task is a range of labels.

    Tasks of a class-incremental run bring classes of their own. Those of a domain-incremental run are the
    domains of the data set: each has all classes, from the first on. Where clients are in different tasks at
    one time, the tasks of the run are stages: each has all classes that anybody has reached.
    """

    index: int
    start: int  # first class of the task
    stop: int  # one past the last class seen so far
    classes: int  # over all tasks
    count: int  # number of tasks

    @property
    def size(self) -> int:
        """Number of its classes."""
        return self.stop - self.start

    @property
    def returning(self) -> bool:
        """Whether its labels were there before: it is a later domain of the same classes, or stage."""
        return self.index > 0 and self.start == 0


class Partitioner(Protocol):
    """Pure function from the labels of one task to one array of positions a client.

    One with an attribute ``scope = "dataset"`` gets all labels at once, before they are cut into tasks; one
    with ``disjoint = False`` may give an image to several clients or to none.
    """

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, /) -> list[np.ndarray]: ...
