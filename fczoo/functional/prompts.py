"""Prompts and prefixes: their initial values, and the selection by an image's frozen feature."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Evidence, Finding
from fczoo.functional.heads import PromptedHead


def init_prefixes(
    blocks: Sequence[int],
    length: int,
    dim: int,
    init: Literal["normal", "uniform", "zeros"],
    rng: torch.Generator,
) -> Tree:
    """Create the prefixes of some blocks at the start of a run.

    Args:
        blocks: Block numbers.
        length: Tokens L of a prefix.
        dim: Embedding dimension D.
        init: ``normal`` for N(0, 0.02^2), ``uniform`` for U(-1/sqrt D, 1/sqrt D), or ``zeros``.
        rng: Random generator.

    Returns:
        ``prefix.{i}.k`` and ``prefix.{i}.v`` [L, D].
    """

    def prefix() -> Tensor:
        if init == "normal":
            return 0.02 * torch.randn(length, dim, generator=rng)
        bound = dim**-0.5 if init == "uniform" else 0.0
        return torch.empty(length, dim).uniform_(-bound, bound, generator=rng)

    return {f"prefix.{i}.{part}": prefix() for i in blocks for part in "kv"}


def component_weights(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """Compute the weights alpha_m = cos(q * A_m, K_m) of prompt components.

    CODA-Prompt; Smith et al., CVPR 2023.

    Args:
        query: Queries q [B, D].
        attention: Attention vectors A [M, D].
        keys: Keys K [M, D].

    Returns:
        Weights [B, M] in [-1, 1].
    """
    masked_query = F.normalize(query[:, None] * attention, dim=-1)
    return (masked_query * F.normalize(keys, dim=-1)).sum(-1)


def top_positions(scores: Tensor, number: int) -> Tensor:
    """Return the positions of the largest scores, largest first; of equal ones the first.

    Args:
        scores: Scores [..., M].
        number: Number of positions.

    Returns:
        Positions [..., number].
    """
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number]


def gather_prompts(table: Tensor, index: Tensor) -> Tensor:
    """Gather rows of a table, ``table[index]``, with a reproducible gradient; works inside vmap.

    The gradient of plain ``table[index]`` is not the same in every run: if images share a row,
    indexing adds their gradients in the order in which threads finish.

    Args:
        table: Prompts [M, L, D].
        index: Positions [...], int64.

    Returns:
        Rows [..., L, D].
    """
    rows: Tensor = F.embedding(index, table.flatten(1)).unflatten(-1, table.shape[1:])
    return rows


def reshape_prefixes(keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mix key and value prefixes by a reshape, as released code of DualPrompt (JH-LEE-KR) does.

    It lists the keys of all images, then their values. Image i gets entries 2i and 2i + 1, be they
    keys or values.

    Args:
        keys: Key prefixes [B, L, D].
        values: Value prefixes [B, L, D].
        weight: Weights [B]: 1 for images, and 0 for the padding after them, which does not take
            part.

    Returns:
        Key and value prefixes [B, L, D] after the reshape.
    """
    size, real = len(keys), weight.sum().long()
    position = torch.arange(2 * size, device=keys.device)
    position = torch.where(position < real, position, size + position - real).clamp(
        max=2 * size - 1
    )
    pairs = gather_prompts(torch.cat([keys, values]), position.view(size, 2))
    return pairs[:, 0], pairs[:, 1]


def choice_shares(
    evidence: Evidence, chosen: Callable[[Batch], Tensor], size: int
) -> Mapping[str, Finding]:
    """Compute how often each prompt is chosen for each task's test images, at the end of a task.

    Args:
        evidence: Tasks, test images, and payloads if there are any.
        chosen: Function that gives the numbers [B, N] of the prompts chosen for a batch.
        size: Number of prompts.

    Returns:
        ``choices`` with ``share[i][p]`` for task i and prompt p; an empty mapping during a task.
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


@dataclass(frozen=True)
class PromptPool(PromptedHead):
    """Base of methods with a pool of M prompts, N selected per image.

    The selected prompts are those with keys nearest to the image's frozen feature.
    """

    size: int = option(10, "M, prompts in the pool", low=1)
    chosen: int = option(5, "N, prompts selected per image", low=1)
    length: int = option(5, "L_p, tokens per prompt", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen > self.size:
            raise FczooError(
                f"{self.name}.chosen is {self.chosen}, more than the {self.size} prompts of the "
                f"pool; lower it or raise {self.name}.size"
            )

    def start_pool(self, backbone: Backbone, low: float, high: float, rng: torch.Generator) -> Tree:
        """Create the pool at the start of a run, from U(low, high).

        Args:
            backbone: Backbone with tokens of width D and features of length Q.
            low: Lower bound of the values.
            high: Upper bound of the values.
            rng: Random generator.

        Returns:
            ``pool.prompt`` [M, L_p, D] and ``pool.key`` [M, Q], for queries that are features.
        """
        return {
            "pool.prompt": torch.empty(self.size, self.length, backbone.token_dim).uniform_(
                low, high, generator=rng
            ),
            "pool.key": torch.empty(self.size, backbone.dim).uniform_(low, high, generator=rng),
        }
