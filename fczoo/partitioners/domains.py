"""Feature skew: every client has images of one domain."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner
from fczoo.partitioners.dirichlet import Dirichlet


@register_partitioner("domains")
@dataclass(frozen=True)
class Domains:
    """Every client has images of one domain; with more clients than domains, several share one.

    Client k = 0, 1, ... has domain k modulo the number of domains. With as many clients as domains
    each client has a whole domain. A client may have no images in a task.
    """

    needs_groups: ClassVar[bool] = True
    scope: ClassVar[str] = "dataset"

    alpha: float | None = option(
        None,
        "concentration of the Dirichlet shares of a domain's clients in each class; none: equal "
        "shares",
        low=1e-6,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, *, groups: np.ndarray
    ) -> list[np.ndarray]:
        names = np.unique(groups)
        if clients < len(names):
            problem = f"{len(names)} domains need at least as many clients, not {clients}"
            raise FczooError(f"{problem}; raise --clients, or take --partition natural")
        parts = [np.empty(0, np.int64)] * clients
        for number, name in enumerate(names):
            images, members = np.flatnonzero(groups == name), range(number, clients, len(names))
            if len(images) < len(members):
                problem = f"domain {name} has {len(images)} images for {len(members)} clients"
                raise FczooError(f"{problem}; lower --clients")
            shares = self._share(labels[images], len(members), rng)
            for client, share in zip(members, shares, strict=True):
                parts[client] = images[share]
        return parts

    def _share(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Split the images of one domain over its clients.

        Equal shares are equal in every class, and no client is empty.
        """
        if self.alpha is not None:
            return Dirichlet(self.alpha)(labels, clients, rng)
        images = rng.permutation(len(labels))
        images = images[np.argsort(labels[images], kind="stable")]
        return [images[client::clients] for client in range(clients)]
