"""Index of the clients' images in one task, and how many clients have joined by a task."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import overload

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream


class ClientIndex(Sequence[np.ndarray]):
    """One ascending array of positions per client.

    All are stored in one array: 10,000 clients take no more memory than ten.
    """

    def __init__(self, parts: Iterable[np.ndarray]):
        """Join the parts in one array.

        Args:
            parts: One array of positions per client.
        """
        arrays = list(parts)
        # positions of all clients, one client after another
        self.positions = _compact(np.concatenate([np.empty(0, dtype=np.int64), *arrays]))
        self.sizes = np.array([len(part) for part in arrays], dtype=np.int64)  # [clients] images
        # [clients + 1] offsets in ``positions``
        self._starts = _compact(np.concatenate([[0], np.cumsum(self.sizes)]))

    @staticmethod
    def of(parts: Iterable[np.ndarray]) -> "ClientIndex":
        """Return the parts in one array.

        Args:
            parts: One array of positions per client, or a ``ClientIndex``, which is returned
                itself.
        """
        return parts if isinstance(parts, ClientIndex) else ClientIndex(parts)

    def within(self, order: np.ndarray) -> "ClientIndex":
        """Return the same images by their rank in ``order`` instead of by position.

        Args:
            order: Ascending positions, which contain all positions of this index.
        """
        result = copy(self)
        result.positions = _compact(np.searchsorted(order, self.positions))
        return result

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, client: slice) -> list[np.ndarray]: ...
    def __getitem__(self, client: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(client)
        client %= len(self)
        return self.positions[self._starts[client] : self._starts[client + 1]].astype(np.int64)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[client] for client in range(len(self)))


def _compact(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers in half the memory, if they fit."""
    small = np.iinfo(np.int32)
    fit = small.min <= numbers.min(initial=0) and numbers.max(initial=0) <= small.max
    return numbers.astype(np.int32) if fit else numbers


@dataclass(frozen=True)
class ClientGrowth:
    """``first`` clients at the start and ``joining`` new ones at every later task.

    At each later task int(transition * n) of the n earlier clients are drawn again. They and the
    joining clients get data of the task; the others get none. GLFC and FCILPT have ``first`` 30,
    ``joining`` 10 and ``transition`` 0.9.
    """

    first: int
    joining: int = 0
    transition: float = 1.0

    def __post_init__(self) -> None:
        if self.first < 1:
            raise FczooError(f"--clients is {self.first}; it must be at least 1")

    def client_count(self, task: int) -> int:
        """Return the number of clients that have joined by a task; they are numbered in this order.

        Args:
            task: Number of the task, from 0.
        """
        return self.first + self.joining * task

    def receivers(self, task: int, seed: int) -> np.ndarray:
        """Return the numbers of the clients that get data of a task, ascending.

        Args:
            task: Number of the task, from 0.
            seed: Seed of the draw of the earlier clients.
        """
        if task == 0:
            return np.arange(self.first)
        earlier = self.client_count(task - 1)
        number = int(self.transition * earlier + 1e-9)
        selection = numpy_stream("population", seed, task).choice(earlier, number, replace=False)
        return np.concatenate([np.sort(selection), np.arange(earlier, self.client_count(task))])
