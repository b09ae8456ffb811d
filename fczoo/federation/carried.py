"""What a run carries from one round to the next, as trees of tensors."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.tree import Tree, nbytes


class Kept(NamedTuple):
    """What clients keep from one exchange to the next: all of them, or some."""

    memories: dict[int, Tree]  # client -> what it remembers, see core.method.Remembers
    taught: dict[int, dict[int, Tensor]]  # client -> position of an image -> output [C] of the task's teacher
    controls: dict[int, Tree]  # client -> its control variates, see Controls

    def of(self, clients: Iterable[int]) -> "Kept":
        """The part of some clients."""
        numbers = list(clients)
        return Kept(
            {k: self.memories[k] for k in numbers if k in self.memories},
            {k: self.taught[k] for k in numbers if k in self.taught},
            {k: self.controls[k] for k in numbers if k in self.controls},
        )

    def take(self, later: "Kept") -> None:
        """What some clients keep from now on."""
        self.memories.update(later.memories)
        self.taught.update(later.taught)
        self.controls.update(later.controls)


class Carried(NamedTuple):
    """All that a run goes on from, besides its result and the downlink's ledger."""

    state: Tree  # the server's
    kept: Kept  # by the clients
    control: Tree  # the server's control variates, see Controls
    begin: Tree  # trained tensors as the task began, for diagnostics; empty without


def memory_bytes(memory: Tree, exemplars: str, image: int) -> int:
    """Bytes of a client's memory; each position in the tensor ``exemplars`` counts as ``image`` bytes."""
    rest = {name: value for name, value in memory.items() if name != exemplars}
    return nbytes(rest) + image * len(memory.get(exemplars, ()))


def to_trees(carried: Carried) -> dict[str, Tree]:
    """The trees of a snapshot; ``from_trees`` reads them."""
    own = {"state": carried.state, "control": carried.control, "begin": carried.begin}
    return {**own, **kept_trees(carried.kept)}


def from_trees(trees: Mapping[str, Tree]) -> Carried:
    """What ``to_trees`` was given."""
    return Carried(trees["state"], kept_in(trees), trees["control"], trees["begin"])


def kept_trees(kept: Kept) -> dict[str, Tree]:
    """What clients keep; ``kept_in`` reads it."""
    trees = {f"memory.{client}": memory for client, memory in kept.memories.items()}
    trees |= {f"control.{client}": variates for client, variates in kept.controls.items()}
    for client, taught in kept.taught.items():
        positions, outputs = list(taught), list(taught.values())
        trees[f"taught.{client}"] = {"position": torch.tensor(positions), "output": torch.stack(outputs)}
    return trees


def kept_in(trees: Mapping[str, Tree]) -> Kept:
    """What ``kept_trees`` was given, among other trees."""
    taught = {
        client: dict(zip(tree["position"].tolist(), tree["output"], strict=True))
        for client, tree in _by_client(trees, "taught.").items()
    }
    return Kept(_by_client(trees, "memory."), taught, _by_client(trees, "control."))


def _by_client(trees: Mapping[str, Tree], prefix: str) -> dict[int, Tree]:
    return {int(k.removeprefix(prefix)): v for k, v in trees.items() if k.startswith(prefix)}
