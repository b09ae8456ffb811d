"""Label skew by one Dirichlet draw per class (Hsu, Qi and Brown, 2019)."""

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner

log = logging.getLogger("fczoo")


@register_partitioner("dirichlet")
@dataclass(frozen=True)
class Dirichlet:
    """The clients' shares of each class are drawn from Dir(beta, ..., beta); disjoint and covering.

    A draw that leaves a client below ``min_size`` images is repeated, ``max_tries`` times at most;
    then images move from the largest client to those below, with a warning. ``min_size`` is capped
    at an equal share.

    As released by fed-mammoth (HGP): ``dirichlet:BETA,draw=sample``, and its mode "extended" for
    many clients: ``dirichlet:BETA,draw=sample,reserve=7``; by PILoRA:
    ``dirichlet:BETA,cap=on,min_size=10``; by FPPL:
    ``dirichlet:BETA,scope=dataset,cap=on,min_size=10``, where a client may have nothing in a task.
    """

    beta: float = option(0.5, "concentration: small is skewed, large is IID", low=1e-6)
    scope: Literal["task", "dataset"] = option(
        "task",
        "split every task by itself, or the whole data set before it is cut into tasks",
        kw_only=True,
    )
    draw: Literal["split", "sample"] = option(
        "split",
        "cut each class at the drawn shares, or draw an owner for every image (fed-mammoth)",
    )
    cap: bool = option(
        False,
        "give nothing more to clients that hold an equal share already (released PILoRA and FPPL)",
    )
    min_size: int = option(
        6, "fewest images a client may own in a task or, with scope=dataset, in all", low=1
    )
    max_tries: int = option(100, "draws before the repair", low=1)
    reserve: int = option(
        0,
        "images that each client draws, from its own share of the classes, before the others are "
        "split; where two draw the same image, the later one has it (fed-mammoth, extended: 7)",
        low=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        smallest = min(self.min_size, len(labels) // clients)
        reserved = self._reserve(labels, clients, rng)
        for _ in range(self.max_tries):
            owners = self._once(labels, clients, rng)
            owners = np.where(reserved < 0, owners, reserved)
            parts = [np.flatnonzero(owners == k) for k in range(clients)]
            if min(map(len, parts)) >= smallest:
                return parts
        problem = (
            "dirichlet:%g left a client below %d images in %d draws; the last draw was repaired"
        )
        log.warning(problem, self.beta, smallest, self.max_tries)
        return _repair(parts, smallest)

    def _reserve(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each image that a client reserves, -1 for all others, [N]."""
        owners = np.full(len(labels), -1)
        if not self.reserve:
            return owners
        classes = np.unique(labels)
        images = {c: np.flatnonzero(labels == c) for c in classes}
        shares = rng.dirichlet(np.full(clients, self.beta), len(classes))  # [classes, clients]
        for k in range(clients):
            share = shares[:, k]
            share = (
                share / share.sum() if share.sum() > 0 else np.full(len(classes), 1 / len(classes))
            )
            for c in rng.choice(classes, self.reserve, p=share):
                owners[rng.choice(images[c])] = k
        return owners

    def _once(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each image, [N]."""
        owners = np.empty(len(labels), np.int64)
        sizes = np.zeros(clients, np.int64)
        for c in np.unique(labels):
            images = rng.permutation(np.flatnonzero(labels == c))
            shares = rng.dirichlet(np.full(clients, self.beta))
            if self.cap:
                shares = shares * (sizes < len(labels) / clients)
            # a tiny beta can underflow to all zeros: then everything goes to one client drawn at
            # random
            shares = (
                shares / shares.sum()
                if shares.sum() > 0
                else np.eye(clients)[rng.integers(clients)]
            )
            if self.draw == "sample":
                owners[images] = rng.choice(clients, len(images), p=shares)
            else:
                # 24.999... images are 25
                cuts = (np.cumsum(shares)[:-1] * len(images) + 1e-9).astype(np.int64)
                owners[images] = np.repeat(np.arange(clients), np.diff([0, *cuts, len(images)]))
            sizes += np.bincount(owners[images], minlength=clients)
        return owners


def _repair(parts: list[np.ndarray], smallest: int) -> list[np.ndarray]:
    """Move single images from the largest client to each one below ``smallest``."""
    parts = [*parts]
    for poor in range(len(parts)):
        while len(parts[poor]) < smallest:
            rich = max(range(len(parts)), key=lambda k: len(parts[k]))
            parts[poor] = np.append(parts[poor], parts[rich][-1])
            parts[rich] = parts[rich][:-1]
    return parts
