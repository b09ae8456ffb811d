"""Low-rank adapters (LoRA)."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree, select


def lora_pairs(
    backbone: Backbone,
    blocks: tuple[int, ...],
    rank: int,
    rng: torch.Generator,
    label: str,
    parts: Sequence[str] = "qv",
) -> Tree:
    """New LoRA pairs on some parts of some blocks: A [r, in] from U(-1/sqrt in, 1/sqrt in), B [out, r] zero.

    Raises FczooError, naming the option ``label``, for blocks that the backbone does not have.
    """
    backbone.check_blocks(blocks, label)
    pairs: Tree = {}
    for block, part in itertools.product(blocks, parts):
        width, out = backbone.lora_shape(part)
        bound = width**-0.5
        pairs[f"lora.{block}.{part}.a"] = torch.empty(rank, width).uniform_(-bound, bound, generator=rng)
        pairs[f"lora.{block}.{part}.b"] = torch.zeros(out, rank)
    return pairs


def frozen_pairs(state: Tree) -> Tree:
    """``past.X.a`` [t, r, D] and ``past.X.b`` [t, D, r] of all t tasks, the current one included."""
    past = {}
    for name, value in select(state, "lora.").items():
        earlier = name.replace("lora.", "past.", 1)
        past[earlier] = torch.cat([state[earlier], value[None]]) if earlier in state else value[None]
    return past


def merged_pairs(tree: Tree, merge: Literal["sum", "factor_sum", "first"]) -> Tree:
    """One pair ``lora.X.a``, ``lora.X.b`` a layer from the pairs of all tasks, past and current.

    sum: the update is sum B_i A_i. factor_sum: (sum B_i)(sum A_i). first: the first task's pair alone.
    """
    merged = {}
    for name, now in select(tree, "lora.").items():
        past = tree.get(name.replace("lora.", "past.", 1))
        if past is None:
            merged[name] = now
        elif merge == "first":
            merged[name] = past[0]
        elif merge == "factor_sum":
            merged[name] = past.sum(0) + now
        else:  # stacked ranks: [B_1 .. B_t] [A_1; ..; A_t] = sum of B_i A_i
            merged[name] = torch.cat([*past, now], dim=0 if name.endswith(".a") else 1)
    return merged


def lora_cosines(state: Tree) -> Tensor:
    """[t, t]: mean over layers of the cosine between the tasks' updates B A; 0 where an update is 0.

    Reads ``past.X.a`` [t-1, r, D], ``past.X.b`` [t-1, D, r] and the current ``lora.X.a``, ``lora.X.b`` of
    each layer X.
    """
    layers = [k[len("lora.") : -2] for k in state if k.startswith("lora.") and k.endswith(".a")]
    cosines = []
    for layer in layers:
        down = torch.cat([state[f"past.{layer}.a"], state[f"lora.{layer}.a"][None]]).double()
        up = torch.cat([state[f"past.{layer}.b"], state[f"lora.{layer}.b"][None]]).double()
        updates = torch.nn.functional.normalize((up @ down).flatten(1), dim=1)
        cosines.append(updates @ updates.mT)
    return torch.stack(cosines).mean(0).cpu()
