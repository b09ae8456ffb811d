"""Every client gets an equal share of every class."""

import numpy as np

from fczoo.core.registry import register_partitioner


@register_partitioner("iid")
def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client an equal share of every class; left-over images go to random clients.

    Args:
        labels: Labels of the images [N].
        clients: Number of clients.
        rng: Random generator.

    Returns:
        Positions of each client's images.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c in np.unique(labels):
        shares = np.array_split(rng.permutation(np.flatnonzero(labels == c)), clients)
        for client, share in zip(rng.permutation(clients), shares, strict=True):
            parts[client].append(share)
    return [np.concatenate(p) for p in parts]
