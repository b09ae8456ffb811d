"""Clients over time: how many have joined by a task, and which of them get its data."""

from dataclasses import dataclass

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream


@dataclass(frozen=True)
class Population:
    """``first`` clients at the start and ``joining`` new ones at every later task.

    At a new task a part ``transition`` of the earlier clients, drawn anew (int(transition * n) of n),
    gets data of it, as do those who join; the others get none. GLFC and FCILPT: 30 first, 10 joining,
    0.9.
    """

    first: int
    joining: int = 0
    transition: float = 1.0

    def __post_init__(self) -> None:
        if self.first < 1:
            raise FczooError(f"{self.first} clients cannot hold data; choose --clients 1 or more")

    def joined(self, task: int) -> int:
        """Clients that have joined by the task of this index; they are numbered in order of joining."""
        return self.first + self.joining * task

    def receivers(self, task: int, seed: int) -> np.ndarray:
        """Numbers of the clients that get data of the task, ascending."""
        if task == 0:
            return np.arange(self.first)
        earlier = self.joined(task - 1)
        number = int(self.transition * earlier + 1e-9)
        drawn = numpy_stream("population", seed, task).choice(earlier, number, replace=False)
        return np.concatenate([np.sort(drawn), np.arange(earlier, self.joined(task))])
