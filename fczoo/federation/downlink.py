"""The way from the server to the clients: what is broadcast, and what of it each client has."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fczoo.core.method import Method
from fczoo.core.tree import Tree, drop, nbytes


class Ledger:
    """When the server's tensors have changed, and when each client was sent what there was."""

    def __init__(self) -> None:
        self.clock = 0  # counts changes of the state
        self.changed: dict[str, int] = {}  # state name -> when it has changed last
        self.told: dict[int, int] = {}  # client -> when it was sent a broadcast last

    def update(self, before: Tree, after: Tree) -> None:
        """Note which tensors of the state are new or have changed."""
        self.clock += 1
        for name, value in after.items():
            old = before.get(name)
            if old is None or old.shape != value.shape or not torch.equal(old, value):
                self.changed[name] = self.clock

    def send(self, tree: Tree, clients: Sequence[int]) -> int:
        """Bytes that the clients do not have yet of a broadcast; they have them from now on."""
        total = 0
        for client in clients:
            told = self.told.get(client, 0)
            total += nbytes({name: v for name, v in tree.items() if self.changed[name] > told})
            self.told[client] = self.clock
        return total

    def notes(self) -> dict[str, Any]:
        """As plain values, which ``restore`` takes."""
        return {"clock": self.clock, "changed": self.changed, "told": list(self.told.items())}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from what ``notes`` gave."""
        self.clock, self.changed, self.told = notes["clock"], dict(notes["changed"]), dict(notes["told"])


def broadcast(method: Method, state: Tree) -> Tree:
    """What the server sends: everything but the private part."""
    return drop(state, *method.private) if method.private else dict(state)
