"""Tasks, and who splits their images over clients: what a data set needs of the contract, without torch."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Task:
    """Classes are numbered in order of arrival, so a task is a range of labels."""

    index: int
    start: int  # first new class
    stop: int  # one past the last class seen so far
    classes: int  # over all tasks
    count: int  # number of tasks

    @property
    def size(self) -> int:
        """Number of new classes."""
        return self.stop - self.start


class Partitioner(Protocol):
    """Pure function from the labels of one task to one array of positions a client.

    One with an attribute ``scope = "dataset"`` gets all labels at once, before they are cut into tasks; one
    with ``disjoint = False`` may give an image to several clients or to none.
    """

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, /) -> list[np.ndarray]: ...
