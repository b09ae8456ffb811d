"""What a baseline trains besides its head: everything, LoRA pairs, or nothing."""

from typing import Literal

import torch
from torch import Tensor

from .backbone import Backbone
from .core import Batch, Tree, select

Tune = Literal["full", "lora", "head"]


def start_plugs(tune: Tune, backbone: Backbone, rank: int, blocks: tuple[int, ...], rng: torch.Generator) -> Tree:
    """Trainable plugs as a run starts: all weights, LoRA on q and v of ``blocks`` (B = 0), or none."""
    if tune == "full":
        return backbone.full_weights()
    if tune == "head":
        return {}
    backbone.check_blocks(blocks, "blocks")
    dim, plugs = backbone.dim, {}
    for name in (f"lora.{i}.{part}" for i in blocks for part in "qv"):
        plugs[f"{name}.a"] = torch.empty(rank, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=rng)
        plugs[f"{name}.b"] = torch.zeros(dim, rank)
    return plugs


def wanted_inputs(tune: Tune) -> frozenset[str]:
    """A method that trains only its head reads frozen features, which the engine keeps."""
    return frozenset({"query"}) if tune == "head" else frozenset({"images"})


def tuned_features(tune: Tune, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
    """Features [B, D] under the current plugs."""
    return batch.q if tune == "head" else backbone(batch.x, select(tree, "full.", "lora."))
