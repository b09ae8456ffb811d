"""PILoRA's re-weighted prototypes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from fczoo.core.registry import register_merge
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator


@register_merge("prototype_reweight")
def prototype_reweight(
    payloads: Sequence[Payload],
    average: ServerAggregator = fedavg,
    temperature: float = 0.2,
    squared: bool = False,
) -> Tree:
    """PILoRA's server step: average the LoRA pairs, weight the prototypes by closeness to the class means.

    Reads ``prototype`` [c, D], ``class.count`` [c] and ``class.mean`` [c, D] of every payload;
    ``average`` merges all other tensors. Returns the merged tensors and ``prototype`` [c, D].

    Source: Guo et al., ECCV 2024, equations 11 to 14, with the temperature as divisor as in the released
    code.
    """
    merged = average([p.drop("prototype", "class.") for p in payloads])
    local = torch.stack([p["prototype"] for p in payloads])  # [K, c, D]
    weights = uploaded_weights(payloads, temperature, squared)
    return {**merged, "prototype": torch.einsum("kc,kcd->cd", weights, local)}


def uploaded_weights(payloads: Sequence[Payload], temperature: float, squared: bool) -> Tensor:
    """``prototype_weights`` [K, c] of what clients have uploaded."""
    prototypes, means, counts = (
        torch.stack([p[name] for p in payloads]) for name in ("prototype", "class.mean", "class.count")
    )
    return prototype_weights(prototypes, means, counts > 0, temperature, squared)


def prototype_weights(
    local: Tensor, means: Tensor, present: Tensor, temperature: float = 0.2, squared: bool = False
) -> Tensor:
    """Weight of every client's prototype, [K, c]; each column sums to 1.

    ``local`` and ``means`` are [K, c, D]; ``present`` [K, c] is true where the client holds the class.
    d_k adds up the distances of client k's prototype to the means of all clients that hold the class; p =
    1/d is rescaled to [0, 1] over the clients and goes through a softmax. All clients weigh the same in a
    class that nobody holds, or to whose means all prototypes are equally far.
    """
    gap = local[:, None] - means[None]  # [k, holder, c, D]
    distance = gap.square().sum(-1) if squared else torch.linalg.vector_norm(gap, dim=-1)
    far = (distance * present).sum(1)  # d [K, c]
    near = 1 / (far + 1e-12)  # p
    low, high = near.amin(0), near.amax(0)
    even = ~present.any(0) | (high - low <= 1e-12 * high)
    scaled = (near - low) / torch.where(even, torch.ones_like(high), high - low)
    return torch.where(even, torch.full_like(near, 1 / len(local)), torch.softmax(scaled / temperature, 0))
