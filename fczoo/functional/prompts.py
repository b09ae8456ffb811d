"""Choosing prompts by the frozen feature of an image."""

import torch.nn.functional as F
from torch import Tensor


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine similarity [B, M] of queries [B, D] and keys [M, D]."""
    return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT


def highest(scores: Tensor, number: int) -> Tensor:
    """Positions [..., number] of the largest scores, largest first; of equal ones the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number]
