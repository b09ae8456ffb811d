"""Merges of class statistics: Gaussians and prototypes side by side, or prototypes re-weighted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from fczoo.core.registry import register_merge
from fczoo.core.tree import Tree, select
from fczoo.core.types import ServerAggregator


@register_merge("prototype_reweight")
def prototype_reweight(
    payloads: Sequence[Payload],
    average: ServerAggregator = fedavg,
    temperature: float = 0.2,
    squared: bool = False,
) -> Tree:
    """Apply PILoRA's server step: average LoRA pairs, weight prototypes by closeness to means.

    The means are those of the classes at the clients.

    Source: Guo et al., ECCV 2024, equations 11 to 14, with the temperature as divisor as in the
    released code.

    Args:
        payloads: Uploads with ``prototype`` [c, D], ``class.count`` [c] and ``class.mean`` [c, D].
        average: Aggregator of all other tensors.
        temperature: Divisor of the scores before the softmax.
        squared: Whether distances are squared.

    Returns:
        The merged tensors and ``prototype`` [c, D].
    """
    averages = average([p.drop("prototype", "class.") for p in payloads])
    local = torch.stack([p["prototype"] for p in payloads])  # [K, c, D]
    weights = uploaded_weights(payloads, temperature, squared)
    return {**averages, "prototype": torch.einsum("kc,kcd->cd", weights, local)}


def uploaded_weights(payloads: Sequence[Payload], temperature: float, squared: bool) -> Tensor:
    """Return ``prototype_weights`` [K, c] of the uploads.

    Args:
        payloads: Uploads with ``prototype``, ``class.count`` and ``class.mean``.
        temperature: Divisor of the scores before the softmax.
        squared: Whether distances are squared.
    """
    prototypes, means, counts = (
        torch.stack([p[name] for p in payloads])
        for name in ("prototype", "class.mean", "class.count")
    )
    return prototype_weights(prototypes, means, counts > 0, temperature, squared)


def prototype_weights(
    local: Tensor, means: Tensor, present: Tensor, temperature: float = 0.2, squared: bool = False
) -> Tensor:
    """Weight every client's prototype.

    d_k is the sum of the distances of client k's prototype to the means of all clients that hold
    the class; p = 1/d is rescaled to [0, 1] over the clients, before a softmax. All clients have
    the same weight if no client holds the class, or if all d_k are equal.

    Args:
        local: Prototypes [K, c, D].
        means: Class means [K, c, D].
        present: Mask [K, c], true where the client holds the class.
        temperature: Divisor of the scores before the softmax.
        squared: Whether distances are squared.

    Returns:
        Weights [K, c]; each column sums to 1.
    """
    gap = local[:, None] - means[None]  # [k, holder, c, D]
    distance = gap.square().sum(-1) if squared else torch.linalg.vector_norm(gap, dim=-1)
    distance_sum = (distance * present).sum(1)  # d [K, c]
    closeness = 1 / (distance_sum + 1e-12)  # p
    low, high = closeness.amin(0), closeness.amax(0)
    even = ~present.any(0) | (high - low <= 1e-12 * high)
    scores = (closeness - low) / torch.where(even, torch.ones_like(high), high - low)
    return torch.where(
        even, torch.full_like(closeness, 1 / len(local)), torch.softmax(scores / temperature, 0)
    )


@register_merge("gaussian_mixture")
def gaussian_mixture(payloads: Sequence[Payload], average: ServerAggregator = fedavg) -> Tree:
    """Apply HGP's server step: average prompt and head, concatenate the clients' Gaussians.

    The mixture of class c draws client m with pi = n_{m,c} / sum_m n_{m,c}.

    Source: Salami et al., section 3.2.

    Args:
        payloads: Uploads with ``gauss.label`` [g], ``gauss.count`` [g], ``gauss.mean`` and
            ``gauss.var`` [g, D].
        average: Aggregator of all other tensors.

    Returns:
        The merged tensors, and ``gauss.client`` [g], the sender of each Gaussian.
    """
    return collect_rows(payloads, "gauss.", average)


@register_merge("prototype_pool")
def prototype_pool(payloads: Sequence[Payload], average: ServerAggregator = fedavg) -> Tree:
    """Apply FPPL's server step: average prompt, fusion and head, concatenate class prototypes.

    Args:
        payloads: Uploads with ``local.label`` [p] and ``local.mean`` [p, D].
        average: Aggregator of all other tensors.

    Returns:
        The merged tensors, and ``local.client`` [p], the sender of each prototype.
    """
    return collect_rows(payloads, "local.", average)


def collect_rows(payloads: Sequence[Payload], prefix: str, average: ServerAggregator) -> Tree:
    """Concatenate the rows of some tensors over the clients, and average the others.

    Args:
        payloads: Uploads with ``PREFIXlabel``.
        prefix: Start of the names of the tensors whose rows are concatenated.
        average: Aggregator of the others.

    Returns:
        The merged tensors, and ``PREFIXclient``, int64, the client that sent each row.
    """
    rows = {k: torch.cat([p[k] for p in payloads]) for k in payloads[0].only(prefix)}
    owner = torch.cat([torch.full_like(p[f"{prefix}label"], p.client) for p in payloads])
    return {**average([p.drop(prefix) for p in payloads]), **rows, f"{prefix}client": owner}


def keep_latest(state: Tree, merged: Tree, prefix: str) -> Tree:
    """Replace rows of the server by merged rows of the same (client, label).

    Rows of a client thus stay until it sends the same labels again.

    Args:
        state: The server's tensors, with ``PREFIXlabel`` and ``PREFIXclient``.
        merged: Result of ``collect_rows``.
        prefix: Start of the names of these tensors.

    Returns:
        The rows of the server without those replaced, followed by the merged rows.
    """
    old, new = select(state, prefix), select(merged, prefix)
    label, client = old[f"{prefix}label"], old[f"{prefix}client"]
    same_label = label[:, None] == new[f"{prefix}label"].to(label)
    same_client = client[:, None] == new[f"{prefix}client"].to(client)
    keep = ~(same_label & same_client).any(1)
    return {k: torch.cat([old[k][keep], new[k].to(old[k])]) for k in old}
