"""Prompts and prefixes: where they start, and how an image's frozen feature chooses among them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Evidence, Finding


def drawn_prefixes(
    blocks: Sequence[int],
    length: int,
    dim: int,
    init: Literal["normal", "uniform", "zeros"],
    rng: torch.Generator,
) -> Tree:
    """``prefix.{i}.k`` and ``prefix.{i}.v`` [L, D] of some blocks, as a run starts.

    From N(0, 0.02^2), from U(-1/sqrt D, 1/sqrt D), or zeros.
    """

    def prefix() -> Tensor:
        if init == "normal":
            return 0.02 * torch.randn(length, dim, generator=rng)
        bound = dim**-0.5 if init == "uniform" else 0.0
        return torch.empty(length, dim).uniform_(-bound, bound, generator=rng)

    return {f"prefix.{i}.{part}": prefix() for i in blocks for part in "kv"}


def component_weights(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """alpha_m = cos(q * A_m, K_m) [B, M] in [-1, 1] (CODA-Prompt; Smith et al., CVPR 2023).

    Queries q [B, D], attention vectors A and keys K [M, D] of M prompt components.
    """
    attended = F.normalize(query[:, None] * attention, dim=-1)
    return (attended * F.normalize(keys, dim=-1)).sum(-1)


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


def reshaped_prefixes(keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value prefixes as released code of DualPrompt (JH-LEE-KR) mixes them up by a reshape.

    It lists the keys [B, L, D] of all images, then their values; image i gets entries 2i and 2i + 1, whatever
    they are. ``weight`` [B] is 1 for images and 0 for the padding after them, which takes no part.
    """
    size, real = len(keys), weight.sum().long()
    place = torch.arange(2 * size, device=keys.device)
    place = torch.where(place < real, place, size + place - real).clamp(max=2 * size - 1)
    mixed = gather_prompts(torch.cat([keys, values]), place.view(size, 2))
    return mixed[:, 0], mixed[:, 1]


def choice_shares(evidence: Evidence, chosen: Callable[[Batch], Tensor], size: int) -> Mapping[str, Finding]:
    """Diagnostics at the end of a task: each prompt's share of the choices of each task's test images.

    ``chosen`` gives the numbers [B, N] of the prompts that a batch's images take. Returns ``choices`` with
    ``share[i][p]`` for task i and prompt p; nothing during a task.
    """
    if evidence.payloads:
        return {}
    shares = []
    for task in evidence.tasks[: evidence.task.index + 1]:
        counts = torch.zeros(size, dtype=torch.int64)
        for batch in evidence.images(task):
            counts += torch.bincount(chosen(batch).flatten().cpu(), minlength=size)
        shares.append((counts / counts.sum()).tolist())
    return {"choices": {"share": shares}}
