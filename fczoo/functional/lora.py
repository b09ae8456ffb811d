"""LoRA pairs as they start."""

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
    for i, part in ((i, part) for i in blocks for part in "qv"):
        width, out = backbone.lora_shape(part)
        pairs[f"lora.{i}.{part}.a"] = torch.empty(rank, width).uniform_(
            -(width**-0.5), width**-0.5, generator=rng
        )
        pairs[f"lora.{i}.{part}.b"] = torch.zeros(out, rank)
    return pairs
