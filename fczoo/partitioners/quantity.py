"""Label skew by the number of classes a client owns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.registry import register_partitioner


@register_partitioner("quantity")
@dataclass(frozen=True)
class Quantity:
    """Every client owns ``alpha`` classes of each task; owners of a class share its images.

    By default the shares are equal. Owners are drawn until every class has one. If some class still
    has none after ``max_tries`` draws, it replaces, at a random client, a class that also has
    another owner. This is PILoRA's quantity-based imbalance, as fed-mammoth interprets it.

    Setting of FPPL's released code: ``quantity:ALPHA,scope=dataset,anchored=on``. In fczoo alpha is
    a number of classes, in FPPL's code a share of the classes.
    """

    alpha: int = option(2, "classes per client, in a task or, with scope=dataset, in total", low=1)
    scope: Literal["task", "dataset"] = option(
        "task",
        "task: partition each task separately; dataset: partition the whole data set once, before "
        "it is divided into tasks",
        kw_only=True,
    )
    max_tries: int = option(
        100, "maximum number of draws; after that, classes without owner get one", low=1
    )
    anchored: bool = option(
        False,
        "client i always owns class i modulo the number of classes, and draws only its other "
        "classes (released FPPL)",
    )
    draw: Literal["shares", "sample"] = option(
        "shares",
        "how images of a class are assigned to its owners: shares, divided equally; sample, an "
        "owner is drawn for each image (fed-mammoth)",
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        classes = np.unique(labels)
        split = "a task" if self.scope == "task" else "the data set"
        if self.alpha > len(classes):
            problem = f"quantity:{self.alpha} needs more classes than the {len(classes)} of {split}"
            advice = "lower alpha or --tasks" if self.scope == "task" else "lower alpha"
            raise FczooError(f"{problem}; {advice}")
        if self.alpha * clients < len(classes):
            problem = (
                f"quantity:{self.alpha} with {clients} clients cannot cover the {len(classes)}"
            )
            raise FczooError(f"{problem} classes of {split}; raise alpha or --clients")
        owns = self._owners(clients, len(classes), rng)
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for i, c in enumerate(classes):
            owners = rng.permutation(np.flatnonzero(owns[:, i]))
            images = rng.permutation(np.flatnonzero(labels == c))
            shares = np.array_split(images, len(owners))
            if self.draw == "sample":
                image_owners = rng.integers(len(owners), size=len(images))
                shares = [images[image_owners == owner] for owner in range(len(owners))]
            for client, share in zip(owners, shares, strict=True):
                parts[client].append(share)
        return [np.concatenate(p) for p in parts]

    def _owners(self, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a Boolean [clients, classes] matrix.

        Each row has ``alpha`` true entries, each column at least one.
        """
        for _ in range(self.max_tries):
            ranks, each = rng.random((clients, classes)).argsort(1), np.arange(clients)
            if self.anchored:  # swap ranks so that the client's own class is first
                ranks[each, ranks.argmin(1)] = ranks[each, each % classes]
                ranks[each, each % classes] = 0
            owns = ranks < self.alpha
            if owns.any(0).all():
                return owns
        for orphan in np.flatnonzero(~owns.any(0)):
            spare = np.argwhere(owns & (owns.sum(0) > 1))
            client, surplus_class = spare[rng.integers(len(spare))]
            owns[client, [surplus_class, orphan]] = False, True
        return owns
