"""Low-rank adapters (LoRA)."""

import itertools
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import LAYERS, Backbone
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Task
from fczoo.functional.past import joined_past


def chosen_blocks(backbone: Backbone, blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    """An option's blocks; none: all that the backbone has."""
    return tuple(range(backbone.depth)) if blocks is None else blocks


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


def with_fixed(pairs: Tree) -> Tree:
    """New pairs whose A is named ``fixed.X.a``, apart from ``lora.X.b``: clients train B alone."""
    return {k if k.endswith(".b") else k.replace("lora.", "fixed.", 1): v for k, v in pairs.items()}


def next_pairs(state: Tree, fresh: Tree) -> Tree:
    """The state with a task's new pairs of ``with_fixed``; those that it had are ``past.X`` now."""
    past = {**joined_past(state, "fixed.", "past."), **joined_past(state, "lora.", "past.")}
    return {**drop(state, "fixed.", "lora."), **past, **fresh}


def fixed_plugs(tree: Tree) -> Tree:
    """Plugs of pairs of ``with_fixed``, those of all tasks in ``tree`` as one pair a layer."""
    chosen = {k.replace("fixed.", "lora.", 1): v for k, v in select(tree, "fixed.").items()}
    return merged_pairs({**select(tree, "lora.", "past."), **chosen}, "sum")


def fused_pairs(
    backbone: Backbone, blocks: tuple[int, ...], rank: int, rng: torch.Generator, label: str
) -> Tree:
    """New pairs ``lora_a.LAYER`` [r, in] and ``lora_b.LAYER`` [out, r] on all linear layers of some blocks.

    q, k and v are one layer, ``blocks.{i}.attn.qkv``. A and B start as in ``lora_pairs``.
    """
    backbone.check_blocks(blocks, label)
    shapes, pairs = backbone.config.shapes(), {}
    for name in (f"blocks.{block}.{layer}" for block in blocks for layer in LAYERS):
        out, width = shapes[f"{name}.weight"]
        bound = width**-0.5
        pairs[f"lora_a.{name}"] = torch.empty(rank, width).uniform_(-bound, bound, generator=rng)
        pairs[f"lora_b.{name}"] = torch.zeros(out, rank)
    return pairs


def fused_plugs(tree: Tree) -> Tree:
    """Plugs of ``fused_pairs``.

    With ``past_lora_a.LAYER`` [t, r, in] and ``past_lora_b.LAYER`` [t, out, r] beside them, the mean of all
    t + 1 updates B A as one pair.
    """
    plugs: Tree = {}
    for name, down in select(tree, "lora_a.").items():
        layer = name.removeprefix("lora_a.")
        up = tree[f"lora_b.{layer}"]
        if f"past_lora_a.{layer}" in tree:
            past = tree[f"past_lora_b.{layer}"]
            down = torch.cat([*tree[f"past_lora_a.{layer}"], down])
            up = torch.cat([*past, up], 1) / (len(past) + 1)
        _, block, _, part = layer.split(".")
        if part == "qkv":
            plugs |= {f"lora.{block}.{p}.b": b for p, b in zip("qkv", up.chunk(3), strict=True)}
            plugs |= {f"lora.{block}.{p}.a": down for p in "qkv"}
        else:
            plugs |= {f"lora.{block}.{part}.a": down, f"lora.{block}.{part}.b": up}
    return plugs


def layer_of(name: str) -> str:
    """The layer of one of ``fused_pairs``: ``blocks.0.mlp.fc1`` of ``lora_a.blocks.0.mlp.fc1``."""
    return name.partition(".")[2]


def by_turns(task: Task, round: int) -> Collection[str]:
    """``Training.active``: B in a task's first round, A in the second, and so on; always the head."""
    return ("lora_a." if round % 2 else "lora_b."), "head."


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
