"""Label skew in which clients share images: each owns all images of some classes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner


@register_partitioner("overlap")
@dataclass(frozen=True)
class Overlap:
    """Every client draws a fraction of each task's classes and owns all images of these.

    Clients overlap, and a class may belong to no client. GLFC, FCILPT and LGA use this split.
    """

    disjoint: ClassVar[bool] = False

    fraction: float = option(
        0.6,
        "share of a task's classes that a client owns; rounded, at least one class",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        classes = np.unique(labels)
        class_count = max(1, round(self.fraction * len(classes)))
        parts = []
        for _ in range(clients):
            client_classes = rng.choice(classes, class_count, replace=False)
            parts.append(np.flatnonzero(np.isin(labels, client_classes)))
        return parts
