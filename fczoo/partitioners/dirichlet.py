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
    """Label skew: per class, the shares of clients are drawn from Dir(beta, ..., beta).

    Each image belongs to exactly one client. A draw that leaves a client with fewer than
    ``min_size`` images is repeated. After ``max_tries`` draws images move from the largest client
    to those with too few, with a warning. ``min_size`` is capped at an equal share.

    Settings of released code: ``dirichlet:BETA,draw=sample`` (fed-mammoth, HGP), and
    ``dirichlet:BETA,draw=sample,reserve=7`` (fed-mammoth's mode "extended" for many clients);
    ``dirichlet:BETA,cap=on,min_size=10`` (PILoRA);
    ``dirichlet:BETA,scope=dataset,cap=on,min_size=10`` (FPPL), where a client may have no images in
    a task.
    """

    beta: float = option(0.5, "concentration parameter; small: skewed, large: IID", low=1e-6)
    scope: Literal["task", "dataset"] = option(
        "task",
        "task: partition each task separately; dataset: partition the whole data set once, before "
        "it is divided into tasks",
        kw_only=True,
    )
    draw: Literal["split", "sample"] = option(
        "split",
        "how images follow the drawn shares: split, each class is cut at the shares; sample, an "
        "owner is drawn for each image (fed-mammoth)",
    )
    cap: bool = option(
        False,
        "assign no further classes to clients that already have an equal share of images (released "
        "PILoRA and FPPL)",
    )
    min_size: int = option(
        6, "minimum number of images per client, in a task or, with scope=dataset, in total", low=1
    )
    max_tries: int = option(
        100, "maximum number of draws; after that, images move to clients below min_size", low=1
    )
    reserve: int = option(
        0,
        "number of images that each client draws, with class probabilities proportional to its "
        "shares, before the other images are assigned; an image drawn twice belongs to the later "
        "client; fed-mammoth uses 7 in its partition for many clients",
        low=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        min_size = min(self.min_size, len(labels) // clients)
        reserved = self._reserve(labels, clients, rng)
        for _ in range(self.max_tries):
            owners = self._draw_owners(labels, clients, rng)
            owners = np.where(reserved < 0, owners, reserved)
            parts = [np.flatnonzero(owners == k) for k in range(clients)]
            if min(map(len, parts)) >= min_size:
                return parts
        problem = (
            "dirichlet:%g left a client with fewer than %d images in each of %d draws; images of "
            "the largest clients were moved to such clients"
        )
        log.warning(problem, self.beta, min_size, self.max_tries)
        return _repair(parts, min_size)

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

    def _draw_owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
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


def _repair(parts: list[np.ndarray], min_size: int) -> list[np.ndarray]:
    """Move single images from the largest client to each one below ``min_size``."""
    parts = [*parts]
    for client in range(len(parts)):
        while len(parts[client]) < min_size:
            largest_client = max(range(len(parts)), key=lambda k: len(parts[k]))
            parts[client] = np.append(parts[client], parts[largest_client][-1])
            parts[largest_client] = parts[largest_client][:-1]
    return parts
