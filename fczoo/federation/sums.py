"""What the server makes of the clients' sums in a survey."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fczoo.core.payload import Payload
from fczoo.core.tree import Tree


def gathered(payloads: Sequence[Payload], separate: bool) -> Tree:
    """The clients' sums [K, ...] side by side, in the order of their numbers, or their total.

    Totals are those of the data in one place: they are added up in float64, one client after another.
    """
    if separate:
        return {name: torch.stack([payload[name] for payload in payloads]) for name in payloads[0]}
    return {name: _total([payload[name] for payload in payloads]) for name in payloads[0]}


def _total(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    wide = first.is_floating_point() and first.device.type != "mps"  # which has no float64
    total = first.to(torch.float64 if wide else first.dtype, copy=True)
    for value in values[1:]:
        total += value
    return total.to(first.dtype)
