"""What the server makes of the clients' sums in a survey."""

from collections.abc import Sequence

import torch

from fczoo.core.payload import Payload
from fczoo.core.tree import Tree


class Total:
    """Sums over clients: added up in float64, one client after another, so that none has to be kept.

    They are those of the data in one place.
    """

    def __init__(self) -> None:
        self._sums: Tree = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tree: Tree) -> None:
        """One client's."""
        for name, value in tree.items():
            if name in self._sums:
                self._sums[name] += value
            else:
                wide = value.is_floating_point() and value.device.type != "mps"  # which has no float64
                self._sums[name] = value.to(torch.float64 if wide else value.dtype, copy=True)
                self._dtypes[name] = value.dtype

    @property
    def tree(self) -> Tree:
        """The sums so far, each of the type in which it was sent."""
        return {name: value.to(self._dtypes[name]) for name, value in self._sums.items()}


def gathered(payloads: Sequence[Payload], separate: bool) -> Tree:
    """The clients' sums [K, ...] side by side, in the order of their numbers, or their total."""
    if separate:
        return {name: torch.stack([payload[name] for payload in payloads]) for name in payloads[0]}
    total = Total()
    for payload in payloads:
        total.add(payload.tensors)
    return total.tree
