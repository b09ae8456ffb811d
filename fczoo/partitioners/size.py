"""Clients of unequal size with the same mix of labels: sizes by a power law."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner


@register_partitioner("size")
@dataclass(frozen=True)
class Size:
    """Size skew by a power law: client k = 0, 1, ... has a share proportional to (k + 1)^-power.

    The images of a client are drawn at random, so labels are IID. Client 0 is the largest in every
    task. Every client has at least ``min_size`` images, or an equal share if that is less. As in
    the linear, square and exponential partitioners of flwr-datasets, a client's number determines
    its size.
    """

    power: float = option(1.2, "exponent of the power law; 0: equal sizes", low=0)
    scope: Literal["task", "dataset"] = option(
        "task",
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
        shares = np.arange(1, clients + 1, dtype=float) ** -self.power
        return split_by_shares(shares, len(labels), self.min_size, rng)


def split_by_shares(
    shares: np.ndarray, images: int, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draw the images of each client, in proportion to its share.

    Args:
        shares: Share of each client [clients], with any positive sum.
        images: Number of images.
        min_size: Least size of a client; capped at an equal share.
        rng: Random generator.

    Returns:
        Positions of the images of each client.
    """
    sizes = round_sizes(shares / shares.sum(), images, min_size)
    return np.split(rng.permutation(images), np.cumsum(sizes)[:-1])


def round_sizes(shares: np.ndarray, images: int, min_size: int) -> np.ndarray:
    """Round shares of the images to whole numbers, by the largest remainders.

    Images then move, one after another, from the largest client to those below the least size.

    Args:
        shares: Share of each client [clients]; their sum is 1.
        images: Number of images.
        min_size: Least size of a client; capped at an equal share.

    Returns:
        int64 sizes [clients] with the sum ``images``.
    """
    exact = shares * images + 1e-9  # 24.999... images are 25
    sizes = exact.astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: images - sizes.sum()]] += 1
    smallest = min(min_size, images // len(shares))
    while sizes.min() < smallest:
        sizes[[sizes.argmax(), sizes.argmin()]] += [-1, 1]
    return sizes
