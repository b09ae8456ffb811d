"""What a run carries from one round to the next, as the trees of a snapshot."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.tree import Tree, nbytes


class Carried(NamedTuple):
    """All that a run goes on from, besides its result and the downlink's ledger."""

    state: Tree  # the server's
    memories: dict[int, Tree]  # client -> what it keeps; see core.method.Remembers
    taught: dict[int, Tensor]  # position of an image -> output [C] of the task's teacher
    begin: Tree  # trained tensors as the task began, for diagnostics; empty without
    control: Tree  # the server's control variates, see Controls
    controls: dict[int, Tree]  # client -> its own


def memory_bytes(memory: Tree, exemplars: str, image: int) -> int:
    """Bytes of a client's memory; each position in the tensor ``exemplars`` counts as ``image`` bytes."""
    rest = {name: value for name, value in memory.items() if name != exemplars}
    return nbytes(rest) + image * len(memory.get(exemplars, ()))


def to_trees(carried: Carried) -> dict[str, Tree]:
    """The trees of a snapshot; ``from_trees`` reads them."""
    trees = {"state": carried.state, "begin": carried.begin, "control": carried.control}
    if carried.taught:
        positions, outputs = list(carried.taught), list(carried.taught.values())
        trees["taught"] = {"position": torch.tensor(positions), "output": torch.stack(outputs)}
    for client, memory in carried.memories.items():
        trees[f"memory.{client}"] = memory
    for client, variates in carried.controls.items():
        trees[f"control.{client}"] = variates
    return trees


def from_trees(trees: Mapping[str, Tree]) -> Carried:
    """What ``to_trees`` was given."""
    taught: dict[int, Tensor] = {}
    if "taught" in trees:
        kept = trees["taught"]
        taught = dict(zip(kept["position"].tolist(), kept["output"], strict=True))
    begin, control = trees.get("begin", {}), trees.get("control", {})
    return Carried(
        trees["state"], _by_client(trees, "memory."), taught, begin, control, _by_client(trees, "control.")
    )


def _by_client(trees: Mapping[str, Tree], prefix: str) -> dict[int, Tree]:
    return {int(k.removeprefix(prefix)): v for k, v in trees.items() if k.startswith(prefix)}
