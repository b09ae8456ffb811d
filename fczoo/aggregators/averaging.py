"""Weighted means over the clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_aggregator, register_merge
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator


@register_aggregator("fedavg")
def fedavg(payloads: Sequence[Payload]) -> Tree:
    """Average weighted by sample counts, sum_k n_k / n x_k (McMahan et al., 2017).

    Args:
        payloads: Uploads with the same names and shapes.
    """
    n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
    return _mean(payloads, n / n.sum())


@register_aggregator("capped")
@dataclass(frozen=True)
class CappedMean:
    """Mean weighted by sample counts, none above ``times`` * median sample count.

    A client with a huge number of images, real or claimed, cannot dominate the mean.
    """

    times: float = option(3.0, "maximum weight, relative to the median sample count", low=1)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        n = torch.tensor([p.num_samples for p in payloads], dtype=torch.float64)
        n = n.clamp(max=self.times * float(n.sort().values[(len(n) - 1) // 2]))
        return _mean(payloads, n / n.sum())


@register_aggregator("uniform")
def uniform(payloads: Sequence[Payload]) -> Tree:
    """Average over the participants with equal weights, 1/K sum_k x_k.

    Args:
        payloads: Uploads with the same names and shapes.
    """
    return _mean(payloads, torch.full((len(payloads),), 1 / len(payloads), dtype=torch.float64))


def _mean(payloads: Sequence[Payload], weights: Tensor) -> Tree:
    """Return the weighted mean of every tensor.

    It is the first payload plus the weighted mean of the differences from it.

    Thus a tensor that all clients return unchanged stays bit for bit the same. Adam would treat
    rounding differences as gradients.
    """
    means: Tree = {}
    for name, first in payloads[0].items():
        mean_type = mean_dtype(*(payload[name].dtype for payload in payloads))
        exact = torch.promote_types(mean_type, torch.float32)
        start = first.to(exact)
        gap = torch.zeros_like(start)
        for payload, weight in zip(payloads[1:], weights.tolist()[1:], strict=True):
            gap.add_(payload[name].to(exact) - start, alpha=weight)
        means[name] = (start + gap).to(mean_type)
    return means


def stack_uploads(payloads: Sequence[Payload]) -> Tree:
    """Stack the uploads of clients, for a method whose server merges them itself.

    Args:
        payloads: Uploads of K clients with the same tensors.

    Returns:
        Their tensors [K, ...], and ``clients`` [K], the clients' numbers.
    """
    tensors = {name: torch.stack([payload[name] for payload in payloads]) for name in payloads[0]}
    clients = torch.tensor([payload.client for payload in payloads])
    return {"clients": clients.to(next(iter(tensors.values())).device), **tensors}


def mean_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type of a mean of tensors: float64 for integers, else the widest type.

    Args:
        *dtypes: Types of the tensors.
    """
    widest = reduce(torch.promote_types, dtypes)
    return widest if widest.is_floating_point or widest.is_complex else torch.float64


@register_merge("sort_by_usage")
def sort_by_usage(
    payloads: Sequence[Payload], average: ServerAggregator = uniform, specific: int = 0
) -> Tree:
    """Apply FCILPT's server step: sort every client's pool by usage, then average it rank by rank.

    The sort is stable, so equally used prompts keep their order. If some prompts are task-specific,
    these and the others are sorted separately.

    Args:
        payloads: Uploads with ``usage`` [M], ``pool.key`` [M, D] and ``pool.prompt`` [M, L, D].
        average: Aggregator of the sorted pools and all other tensors; ``usage`` is left out.
        specific: Number T of task-specific prompts, which come first; 0: the pool is not divided.
    """
    payloads_by_rank = []
    for payload in payloads:
        order = payload["usage"].argsort(descending=True, stable=True)
        order = order[(order >= specific).to(torch.int8).argsort(stable=True)]
        pool = {k: v[order] for k, v in payload.only("pool.").items()}
        payloads_by_rank.append(payload.holding({**payload.drop("usage"), **pool}))
    return average(payloads_by_rank)
