"""Weighted means over the clients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_aggregator
from fczoo.core.tree import Tree


@register_aggregator("fedavg")
def fedavg(payloads: Sequence[Payload]) -> Tree:
    """Mean weighted by sample counts, sum_k n_k / n x_k (McMahan et al., 2017)."""
    n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
    return _mean(payloads, n / n.sum())


@register_aggregator("capped")
@dataclass(frozen=True)
class Capped:
    """Mean weighted by sample counts, none of them more than ``times`` the median count.

    A client that claims a huge number of images, or has it, cannot decide alone.
    """

    times: float = option(3.0, "N: largest weight of a client, in median sample counts", low=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
        n = n.clamp(max=self.times * float(n.sort().values[(len(n) - 1) // 2]))
        return _mean(payloads, n / n.sum())


@register_aggregator("uniform")
def uniform(payloads: Sequence[Payload]) -> Tree:
    """Plain mean over the participants, 1/K sum_k x_k."""
    return _mean(payloads, torch.full((len(payloads),), 1 / len(payloads), dtype=torch.float64))


def _mean(payloads: Sequence[Payload], weights: Tensor) -> Tree:
    """Weighted mean of every tensor: the first payload plus the weighted mean of the differences from it.

    A tensor that all clients return unchanged therefore stays bit for bit the same; a mere rounding
    difference would look like a gradient to Adam.
    """
    merged: Tree = {}
    for name, first in payloads[0].items():
        kept = mean_dtype(first.dtype)
        exact = torch.promote_types(kept, torch.float32)
        start = first.to(exact)
        gap = torch.zeros_like(start)
        for payload, weight in zip(payloads[1:], weights.tolist()[1:], strict=True):
            gap.add_(payload[name].to(exact) - start, alpha=weight)
        merged[name] = (start + gap).to(kept)
    return merged


def mean_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a mean of tensors of ``dtype``: float64 for integers, else their own."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
