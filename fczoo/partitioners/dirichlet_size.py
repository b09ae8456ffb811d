"""Clients of unequal size with the same mix of labels: sizes by one Dirichlet draw."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner
from fczoo.partitioners.size import split_by_shares


@register_partitioner("dirichlet-size")
@dataclass(frozen=True)
class DirichletSize:
    """Size skew: the clients' shares of all images are drawn from Dir(alpha, ..., alpha).

    The images of a client are drawn at random, so labels are IID. By default one draw holds for the
    whole data set, and a small client may have no images in a task; with ``scope=task`` shares are
    drawn for each task. Every client has at least ``min_size`` images, or an equal share if that is
    less.
    """

    alpha: float = option(0.5, "concentration parameter; small: unequal, large: equal", low=1e-6)
    scope: Literal["task", "dataset"] = option(
        "dataset",
        "task: partition each task separately; dataset: partition the whole data set once, before "
        "it is divided into tasks",
        kw_only=True,
    )
    min_size: int = option(1, "minimum number of images per client", low=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        shares = rng.dirichlet(np.full(clients, self.alpha))
        if not shares.sum() > 0:  # a tiny alpha underflows: one client drawn at random has all
            shares = np.eye(clients)[rng.integers(clients)]
        return split_by_shares(shares, len(labels), self.min_size, rng)
