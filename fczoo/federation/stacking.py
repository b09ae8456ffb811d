"""Functions of one client on several clients at once, in one batched forward."""

from collections.abc import Callable

import torch

from fczoo.core.tree import Tree
from fczoo.core.types import Batch


def over_clients(fn: Callable[[Tree, Batch], Tree], trees: list[Tree], batch: Batch) -> Tree:
    """``fn`` on every client's tree and batch; results are stacked [k, ...]."""
    if len(trees) == 1:
        return {k: v[None] for k, v in fn(trees[0], Batch(*(v[0] for v in batch))).items()}
    stacked = {k: torch.stack([tree[k] for tree in trees]) for k in trees[0]}
    return torch.vmap(fn)(stacked, batch)


def accumulate(sums: list[Tree], new: Tree) -> None:
    """Add stacked results to every client's sums."""
    for name, values in new.items():
        for tree, value in zip(sums, values.detach(), strict=False):  # finished clients add nothing
            tree[name] = tree[name] + value if name in tree else value
