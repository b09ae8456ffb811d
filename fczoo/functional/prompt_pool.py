"""A pool of prompts, each with a key by which images find it (L2P; Wang et al., CVPR 2022)."""

from dataclasses import dataclass

import torch

from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.functional.heads import PromptedHead


@dataclass(frozen=True)
class PromptPool(PromptedHead):
    """Base of methods whose images take the N prompts, of M, with keys nearest to their frozen feature."""

    size: int = option(10, "prompts M in the pool", low=1)
    chosen: int = option(5, "prompts N chosen for an image", low=1)
    length: int = option(5, "tokens L_p of a prompt", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen > self.size:
            raise FczooError(
                f"{self.name}.chosen is {self.chosen}, more than the {self.size} prompts of the pool; "
                f"lower it or raise {self.name}.size"
            )

    def start_pool(self, dim: int, low: float, high: float, rng: torch.Generator) -> Tree:
        """``pool.prompt`` [M, L_p, D] and ``pool.key`` [M, D] as a run starts, from U(low, high)."""
        return {
            "pool.prompt": torch.empty(self.size, self.length, dim).uniform_(low, high, generator=rng),
            "pool.key": torch.empty(self.size, dim).uniform_(low, high, generator=rng),
        }
