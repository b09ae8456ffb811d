"""Label skew by shards of neighbouring labels (McMahan et al., 2017).

The draw is that of PILoRA's released code.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner


@register_partitioner("shards")
@dataclass(frozen=True)
class Shards:
    """The task's images, sorted by label, are cut into shards; every client draws ``alpha``.

    Clients overlap and most images belong to no client. This is the draw of PILoRA's released code
    (its paper describes ``quantity``), which draws again in every round; here a client keeps its
    shards for the whole task.
    """

    disjoint: ClassVar[bool] = False

    alpha: int = option(2, "shards per client", low=1)
    shards: int = option(100, "number of shards into which each task is cut", low=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if self.alpha > self.shards:
            problem = f"shards:{self.alpha} draws more than the {self.shards} shards of a task"
            raise FczooError(f"{problem}; lower alpha or raise shards")
        if self.shards > len(labels):
            problem = f"a task of {len(labels)} images cannot be cut into {self.shards} shards"
            raise FczooError(f"{problem}; lower shards or --tasks")
        shards, parts = np.array_split(labels.argsort(kind="stable"), self.shards), []
        for _ in range(clients):
            shard_numbers = rng.choice(self.shards, self.alpha, replace=False)
            parts.append(np.concatenate([shards[i] for i in shard_numbers]))
        return parts
