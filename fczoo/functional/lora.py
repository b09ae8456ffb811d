"""Low-rank adapters (LoRA)."""

import itertools

import torch
from torch import Tensor

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


def lora_cosines(state: Tree) -> Tensor:
    """[t, t]: mean over layers of the cosine between the tasks' updates B A; 0 where an update is 0.

    Reads ``past.X.a`` [t-1, r, D], ``past.X.b`` [t-1, D, r] and the current ``lora.X.a``, ``lora.X.b`` of
    each layer X.
    """
    layers = [k[len("lora.") : -2] for k in state if k.startswith("lora.") and k.endswith(".a")]
    cosines = []
    for layer in layers:
        down, up = (
            torch.cat([state[f"past.{layer}.{end}"], state[f"lora.{layer}.{end}"][None]]).double()
            for end in "ab"
        )
        updates = torch.nn.functional.normalize((up @ down).flatten(1), dim=1)
        cosines.append(updates @ updates.mT)
    return torch.stack(cosines).mean(0).cpu()
