"""The way from the server to the clients: what is broadcast, and which versions each client has."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fczoo.core.method import Method
from fczoo.core.tree import Tree, drop, nbytes


class Ledger:
    """Versions of the server's tensors, and those that the clients know."""

    def __init__(self) -> None:
        self.version: dict[str, int] = {}  # state name -> how often it has changed
        self.known: dict[int, dict[str, int]] = {}  # client -> the versions that it has

    def update(self, before: Tree, after: Tree) -> None:
        """Note which tensors of the state are new or have changed."""
        for name, value in after.items():
            old = before.get(name)
            if old is None or old.shape != value.shape or not torch.equal(old, value):
                self.version[name] = self.version.get(name, 0) + 1

    def send(self, tree: Tree, clients: Sequence[int]) -> int:
        """Bytes that the clients do not have yet of a broadcast; they have them from now on."""
        total, current = 0, {name: self.version[name] for name in tree}
        for client in clients:
            known = self.known.get(client, {})
            total += nbytes({name: v for name, v in tree.items() if known.get(name) != current[name]})
            self.known[client] = current
        return total

    def notes(self) -> dict[str, Any]:
        """As plain values, which ``restore`` takes."""
        return {"version": self.version, "known": list(self.known.items())}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from what ``notes`` gave."""
        self.version, self.known = dict(notes["version"]), dict(notes["known"])


def broadcast(method: Method, state: Tree) -> Tree:
    """What the server sends: everything but the private part."""
    return drop(state, *method.private) if method.private else dict(state)
