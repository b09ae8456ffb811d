"""The way from the server to the clients: what is broadcast, and what of it each client has."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.tree import Tree, drop, nbytes


class Ledger:
    """When the server's tensors have changed, and when each client was sent what there was."""

    def __init__(self) -> None:
        self.clock = 0  # counts changes of the state
        self.changed: dict[str, list[list[int]]] = {}  # state name -> [row, when] of those from a row on
        self.told: dict[int, int] = {}  # client -> when it was sent a broadcast last

    def update(self, before: Tree, after: Tree) -> None:
        """Note which tensors of the state are new or have changed.

        One to which only rows were added, as a stack of finished tasks, has these new.
        """
        self.clock += 1
        for name, value in after.items():
            rows, same = len(torch.atleast_1d(value)), _same_rows(before.get(name), value)
            if same is None:
                self.changed[name] = [[0, self.clock]]
            elif same < rows:
                self.changed[name].append([same, self.clock])

    def send(self, tree: Tree, clients: Sequence[int]) -> int:
        """Bytes that the clients do not have yet of a broadcast; they have them from now on."""
        total = 0
        for client in clients:
            told = self.told.get(client, 0)
            first = {name: self._first_new(name, told) for name in tree}
            total += nbytes({k: torch.atleast_1d(tree[k])[n:] for k, n in first.items() if n is not None})
            self.told[client] = self.clock
        return total

    def _first_new(self, name: str, told: int) -> int | None:
        """The row of a tensor from which on all have changed since then; None where none has."""
        return next((row for row, when in self.changed[name] if when > told), None)  # in order of both

    def notes(self) -> dict[str, Any]:
        """As plain values, which ``restore`` takes."""
        return {"clock": self.clock, "changed": self.changed, "told": list(self.told.items())}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from what ``notes`` gave."""
        self.clock, self.changed, self.told = notes["clock"], dict(notes["changed"]), dict(notes["told"])


def _same_rows(old: Tensor | None, new: Tensor) -> int | None:
    """How many rows a tensor had, where these are as they were; None where one has changed or is gone."""
    if old is None:
        return None
    had, has = torch.atleast_1d(old), torch.atleast_1d(new)
    alike = had.shape[1:] == has.shape[1:] and len(had) <= len(has) and torch.equal(had, has[: len(had)])
    return len(had) if alike else None


def broadcast(method: Method, state: Tree) -> Tree:
    """What the server sends: everything but the private part."""
    return drop(state, *method.private) if method.private else dict(state)
