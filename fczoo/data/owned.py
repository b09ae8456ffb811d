"""Who owns which image in one task, in as little memory as the images ask for."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import overload

import numpy as np


class Owned(Sequence[np.ndarray]):
    """One array of positions a client, ascending. All lie in one: 10,000 clients take no more than ten."""

    def __init__(self, parts: Iterable[np.ndarray]):
        listed = list(parts)
        self.positions = _compact(np.concatenate([np.empty(0, dtype=np.int64), *listed]))  # of all in turn
        self.sizes = np.array([len(part) for part in listed], dtype=np.int64)  # [clients] images
        self._starts = _compact(
            np.concatenate([[0], np.cumsum(self.sizes)])
        )  # [clients + 1] in ``positions``

    @staticmethod
    def of(parts: Iterable[np.ndarray]) -> "Owned":
        """The parts, if they do not lie in one array yet."""
        return parts if isinstance(parts, Owned) else Owned(parts)

    def within(self, order: np.ndarray) -> "Owned":
        """The same images by their place in ``order``, ascending, instead of their position."""
        other = copy(self)
        other.positions = _compact(np.searchsorted(order, self.positions))
        return other

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
    """The numbers in half the memory, if they fit."""
    small = np.iinfo(np.int32)
    fit = small.min <= numbers.min(initial=0) and numbers.max(initial=0) <= small.max
    return numbers.astype(np.int32) if fit else numbers
