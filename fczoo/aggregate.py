"""Server aggregators: pure functions from the payloads of one round to one tree.

Every payload carries ``num_samples`` (n_k) and ``client`` (its number); neither is part of the result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .core import ServerAggregator, Tree, drop, select
from .errors import FczooError
from .registry import AGGREGATORS, register_aggregator

ENVELOPE = ("num_samples", "client")


def make_aggregator(spec: str) -> ServerAggregator:
    """Aggregator by ``NAME``, or ``NAME:VALUE`` where it has options. Raises FczooError when there is none or a value does not fit."""
    name, colon, _ = spec.partition(":")
    entry = AGGREGATORS.get(name)
    if isinstance(entry, type):
        return AGGREGATORS.create(spec)
    if colon:
        raise FczooError(f"aggregator {name} has no options; write {name} instead of {spec}")
    return entry


def only(payloads: Sequence[Tree], *prefixes: str) -> list[Tree]:
    """The payloads cut down to some prefixes, envelope kept."""
    return [select(p, *prefixes, *ENVELOPE) for p in payloads]


@register_aggregator("fedavg")
def fedavg(payloads: Sequence[Tree]) -> Tree:
    """Mean weighted by sample counts, sum_k n_k / n x_k (McMahan et al., 2017)."""
    n = torch.stack([p["num_samples"] for p in payloads]).double()
    return _mean(payloads, n / n.sum())


@register_aggregator("uniform")
def uniform(payloads: Sequence[Tree]) -> Tree:
    """Plain mean over the participants, 1/K sum_k x_k."""
    return _mean(payloads, torch.full((len(payloads),), 1 / len(payloads), dtype=torch.float64))


@register_aggregator("prototype_reweight")
def prototype_reweight(payloads: Sequence[Tree], average: ServerAggregator = fedavg, temperature: float = 0.2, squared: bool = False) -> Tree:
    """PILoRA's server step: average the LoRA pairs, weight the prototypes by closeness to the class means.

    Reads ``prototype`` [c, D], ``class.count`` [c] and ``class.mean`` [c, D] of every payload; averages the rest.
    Guo et al., ECCV 2024, eqs. 11-14 with the temperature as divisor, as in the released code.
    """
    merged = average([drop(p, "prototype", "class.") for p in payloads])
    local = torch.stack([p["prototype"] for p in payloads])  # [K, c, D]
    weights = prototype_weights(
        local,
        torch.stack([p["class.mean"] for p in payloads]),
        torch.stack([p["class.count"] for p in payloads]) > 0,
        temperature,
        squared,
    )
    return {**merged, "prototype": torch.einsum("kc,kcd->cd", weights, local)}


def prototype_weights(local: Tensor, means: Tensor, present: Tensor, temperature: float = 0.2, squared: bool = False) -> Tensor:
    """Weight of every client's prototype, [K, c]; each column sums to 1.

    ``local``, ``means`` [K, c, D], ``present`` [K, c] true where the client holds the class. d_k adds up the distances
    of client k's prototype to the means of all holders, p = 1/d is rescaled to [0, 1] over the clients and goes
    through a softmax. A class that nobody holds, or whose clients are all equally far, is averaged plainly.
    """
    gap = local[:, None] - means[None]  # [k, holder, c, D]
    distance = gap.square().sum(-1) if squared else torch.linalg.vector_norm(gap, dim=-1)
    far = (distance * present).sum(1)  # d [K, c]
    near = 1 / (far + 1e-12)  # p
    low, high = near.amin(0), near.amax(0)
    even = ~present.any(0) | (high - low <= 1e-12 * high)
    scaled = (near - low) / torch.where(even, torch.ones_like(high), high - low)
    return torch.where(even, torch.full_like(near, 1 / len(local)), torch.softmax(scaled / temperature, 0))


@register_aggregator("gaussian_mixture")
def gaussian_mixture(payloads: Sequence[Tree], average: ServerAggregator = fedavg) -> Tree:
    """HGP's server step: average the prompt and the head, put the clients' Gaussians side by side.

    Reads ``gauss.label`` [g], ``gauss.count`` [g], ``gauss.mean`` and ``gauss.var`` [g, D]; adds ``gauss.client``.
    The mixture of class c draws client m with pi = n_{m,c} / sum_m n_{m,c}. Salami et al., section 3.2.
    """
    return collect_rows(payloads, "gauss.", average)


@register_aggregator("prototype_pool")
def prototype_pool(payloads: Sequence[Tree], average: ServerAggregator = fedavg) -> Tree:
    """FPPL's server step: average prompt, fusion and head, put the clients' class prototypes side by side.

    Reads ``local.label`` [p] and ``local.mean`` [p, D]; adds ``local.client``.
    """
    return collect_rows(payloads, "local.", average)


@register_aggregator("sort_by_usage")
def sort_by_usage(payloads: Sequence[Tree], average: ServerAggregator = uniform) -> Tree:
    """FCILPT's server step: rank every client's pool by how often each prompt was chosen, then average rank by rank.

    Reads ``usage`` [M], ``pool.key`` [M, D] and ``pool.prompt`` [M, L, D]; the order is stable, so ties keep their place.
    """
    ranked = []
    for payload in payloads:
        order = payload["usage"].argsort(descending=True, stable=True)
        pool = {k: v[order] for k, v in select(payload, "pool.").items()}
        ranked.append({**drop(payload, "usage"), **pool})
    return average(ranked)


def collect_rows(payloads: Sequence[Tree], prefix: str, average: ServerAggregator) -> Tree:
    """Average what does not start with ``prefix``; concatenate the rows of what does, and note whose each row is."""
    rows = {k: torch.cat([p[k] for p in payloads]) for k in select(payloads[0], prefix)}
    owner = torch.cat([p["client"].expand(len(p[f"{prefix}label"])) for p in payloads])
    return {**average([drop(p, prefix) for p in payloads]), **rows, f"{prefix}client": owner}


def keep_latest(state: Tree, merged: Tree, prefix: str) -> Tree:
    """Rows that the server holds, those of the same (client, label) replaced: what a client sent stays until it sends again."""
    old, new = select(state, prefix), select(merged, prefix)
    label, client = old[f"{prefix}label"], old[f"{prefix}client"]
    same = (label[:, None] == new[f"{prefix}label"].to(label)) & (client[:, None] == new[f"{prefix}client"].to(client))
    keep = ~same.any(1)
    return {k: torch.cat([old[k][keep], new[k].to(old[k])]) for k in old}


def _mean(payloads: Sequence[Tree], weights: Tensor) -> Tree:
    """Weighted mean of every tensor, as the first payload plus the mean distance from it.

    So what all clients return unchanged stays bitwise the same, and does not set Adam off on a difference of rounding.
    """
    merged: Tree = {}
    for name, first in drop(payloads[0], *ENVELOPE).items():
        gap = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for payload, weight in zip(payloads[1:], weights.tolist()[1:], strict=True):
            gap.add_(payload[name] - first, alpha=weight)
        merged[name] = (first + gap).to(first.dtype)
    return merged
