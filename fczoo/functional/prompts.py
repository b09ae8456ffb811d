"""Choosing prompts by the frozen feature of an image."""

import torch.nn.functional as F
from torch import Tensor


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine similarity [B, M] of queries [B, D] and keys [M, D]."""
    return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT


def highest(scores: Tensor, number: int) -> Tensor:
    """Positions [..., number] of the largest scores, largest first; of equal ones the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number]


def gather_prompts(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``: rows [..., L, D] of a table [M, L, D] at int64 positions [...]; works inside vmap.

    Its gradient is the same in every run. The gradient of ``table[index]`` is not: where images share a row,
    indexing adds up their gradients in the order in which threads finish.
    """
    rows: Tensor = F.embedding(index, table.flatten(1)).unflatten(-1, table.shape[1:])
    return rows
