"""One client per hospital, writer or user that the data set names."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_partitioner


@register_partitioner("natural")
@dataclass(frozen=True)
class Natural:
    """Every client has all images of one group, such as a hospital, writer or user.

    With as many clients as groups, clients are numbered as the groups. With fewer clients, whole
    groups are assigned at random; their numbers per client are as equal as possible. A client may
    have no images in a task.
    """

    needs_groups: ClassVar[bool] = True
    scope: ClassVar[str] = "dataset"

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, *, groups: np.ndarray
    ) -> list[np.ndarray]:
        names, group_of = np.unique(groups, return_inverse=True)
        if clients > len(names):
            problem = f"only {len(names)} groups have images, too few for {clients} clients"
            raise FczooError(f"{problem}; lower --clients to {len(names)} or fewer")
        order = rng.permutation(len(names)) if clients < len(names) else np.arange(len(names))
        owner_of_group = np.empty(len(names), np.int64)
        for client, client_groups in enumerate(np.array_split(order, clients)):
            owner_of_group[client_groups] = client
        owners = owner_of_group[group_of]
        cuts = np.cumsum(np.bincount(owners, minlength=clients))[:-1]
        return np.split(np.argsort(owners, kind="stable"), cuts)
