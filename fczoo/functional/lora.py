"""Low-rank adapters (LoRA)."""

import itertools

import torch

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree


def lora_pairs(
    backbone: Backbone, blocks: tuple[int, ...], rank: int, rng: torch.Generator, label: str
) -> Tree:
    """New LoRA pairs on q and v of some blocks: A [r, in] from U(-1/sqrt in, 1/sqrt in), B [out, r] zero.

    Raises FczooError, naming the option ``label``, for blocks that the backbone does not have.
    """
    backbone.check_blocks(blocks, label)
    pairs: Tree = {}
    for block, part in itertools.product(blocks, "qv"):
        width, out = backbone.lora_shape(part)
        bound = width**-0.5
        pairs[f"lora.{block}.{part}.a"] = torch.empty(rank, width).uniform_(-bound, bound, generator=rng)
        pairs[f"lora.{block}.{part}.b"] = torch.zeros(out, rank)
    return pairs
