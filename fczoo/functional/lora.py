"""Low-rank adapters (LoRA)."""

import itertools
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import LAYERS, Backbone
from fczoo.core.tree import Tree, drop, select, stack_past
from fczoo.core.types import Task


def chosen_blocks(backbone: Backbone, blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the blocks of an option.

    Args:
        backbone: The frozen backbone.
        blocks: Block numbers; None: all blocks of the backbone.

    Returns:
        Block numbers.
    """
    return tuple(range(backbone.depth)) if blocks is None else blocks


def lora_pairs(
    backbone: Backbone,
    blocks: tuple[int, ...],
    rank: int,
    rng: torch.Generator,
    label: str,
    parts: Sequence[str] = "qv",
) -> Tree:
    """Create new LoRA pairs on some parts of some blocks.

    Args:
        backbone: The frozen backbone.
        blocks: Block numbers.
        rank: Rank r.
        rng: Random generator.
        label: Name of the option with the blocks, for the error.
        parts: Parts of a block, such as ``q`` and ``v``.

    Returns:
        ``lora.X.a`` A [r, in] from U(-1/sqrt in, 1/sqrt in) and ``lora.X.b`` B [out, r], which is
            zero.

    Raises:
        FczooError: The backbone does not have one of the blocks.
    """
    backbone.check_blocks(blocks, label)
    pairs: Tree = {}
    for block, part in itertools.product(blocks, parts):
        width, out = backbone.lora_shape(part)
        bound = width**-0.5
        pairs[f"lora.{block}.{part}.a"] = torch.empty(rank, width).uniform_(
            -bound, bound, generator=rng
        )
        pairs[f"lora.{block}.{part}.b"] = torch.zeros(out, rank)
    return pairs


def fix_down_projections(pairs: Tree) -> Tree:
    """Rename A of new pairs to ``fixed.X.a``, so that clients train only ``lora.X.b``.

    Args:
        pairs: Pairs of ``lora_pairs``.

    Returns:
        The same tensors under the new names.
    """
    return {k if k.endswith(".b") else k.replace("lora.", "fixed.", 1): v for k, v in pairs.items()}


def next_pairs(state: Tree, fresh: Tree) -> Tree:
    """Add a task's new pairs to the state and move the current ones to ``past.X``.

    Args:
        state: State after the previous task.
        fresh: New pairs of ``fix_down_projections``.

    Returns:
        The state of the new task.
    """
    past = {**stack_past(state, "fixed.", "past."), **stack_past(state, "lora.", "past.")}
    return {**drop(state, "fixed.", "lora."), **past, **fresh}


def fixed_plugs(tree: Tree) -> Tree:
    """Build plugs from pairs of ``fix_down_projections``, with one pair per layer for all tasks.

    Args:
        tree: Tree with ``fixed.X.a``, ``lora.X.b`` and ``past.X`` tensors.

    Returns:
        One pair ``lora.X.a``, ``lora.X.b`` per layer; its update is the sum over tasks.
    """
    chosen = {k.replace("fixed.", "lora.", 1): v for k, v in select(tree, "fixed.").items()}
    return merged_pairs({**select(tree, "lora.", "past."), **chosen}, "sum")


def fused_pairs(
    backbone: Backbone, blocks: tuple[int, ...], rank: int, rng: torch.Generator, label: str
) -> Tree:
    """Create new LoRA pairs on all linear layers of some blocks, with q, k and v as one layer.

    That layer is ``blocks.{i}.attn.qkv``. A and B start as in ``lora_pairs``.

    Args:
        backbone: The frozen backbone.
        blocks: Block numbers.
        rank: Rank r.
        rng: Random generator.
        label: Name of the option with the blocks, for the error.

    Returns:
        ``lora_a.LAYER`` [r, in] and ``lora_b.LAYER`` [out, r].

    Raises:
        FczooError: The backbone does not have one of the blocks.
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
    """Build plugs from pairs of ``fused_pairs``.

    Args:
        tree: Tree with ``lora_a.LAYER`` and ``lora_b.LAYER``. Optional: ``past_lora_a.LAYER`` [t,
            r, in] and ``past_lora_b.LAYER`` [t, out, r] of t earlier tasks.

    Returns:
        One pair per layer; with earlier tasks its update is the mean of all t + 1 updates B A.
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
    """Return the layer of a tensor of ``fused_pairs``.

    Args:
        name: Name of the tensor, such as ``lora_a.blocks.0.mlp.fc1``.

    Returns:
        Name of the layer, such as ``blocks.0.mlp.fc1``.
    """
    return name.partition(".")[2]


def alternate_factors(task: Task, round: int) -> Collection[str]:
    """Return the prefixes of active tensors: B and A in alternate rounds, and always the head.

    This is a function for ``Training.active_prefixes``.

    Args:
        task: Not used.
        round: Round of the task. Even rounds, which include the first, train B; odd ones train A.

    Returns:
        Prefixes of the tensors.
    """
    return ("lora_a." if round % 2 else "lora_b."), "head."


def merged_pairs(tree: Tree, merge: Literal["sum", "factor_sum", "first"]) -> Tree:
    """Merge the pairs of all tasks, past and current, into one pair per layer.

    Args:
        tree: Tree with ``lora.X`` and ``past.X`` tensors.
        merge: ``sum``: the update is sum B_i A_i. ``factor_sum``: (sum B_i)(sum A_i). ``first``:
            only the first task's pair.

    Returns:
        ``lora.X.a`` and ``lora.X.b`` per layer.
    """
    pairs = {}
    for name, current in select(tree, "lora.").items():
        past = tree.get(name.replace("lora.", "past.", 1))
        if past is None:
            pairs[name] = current
        elif merge == "first":
            pairs[name] = past[0]
        elif merge == "factor_sum":
            pairs[name] = past.sum(0) + current
        else:  # stacked ranks: [B_1 .. B_t] [A_1; ..; A_t] = sum of B_i A_i
            pairs[name] = torch.cat([*past, current], dim=0 if name.endswith(".a") else 1)
    return pairs


def lora_cosines(state: Tree) -> Tensor:
    """Compute cosines between the tasks' updates B A, averaged over layers.

    Args:
        state: State with ``past.X.a`` [t-1, r, D], ``past.X.b`` [t-1, D, r] and the current
            ``lora.X.a``, ``lora.X.b`` of each layer X.

    Returns:
        Cosines [t, t]; 0 if an update is 0.
    """
    layers = [k[len("lora.") : -2] for k in state if k.startswith("lora.") and k.endswith(".a")]
    cosines = []
    for layer in layers:
        down = torch.cat([state[f"past.{layer}.a"], state[f"lora.{layer}.a"][None]]).double()
        up = torch.cat([state[f"past.{layer}.b"], state[f"lora.{layer}.b"][None]]).double()
        updates = torch.nn.functional.normalize((up @ down).flatten(1), dim=1)
        cosines.append(updates @ updates.mT)
    return torch.stack(cosines).mean(0).cpu()
