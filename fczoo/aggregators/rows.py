"""Rows of class statistics, put side by side."""

from collections.abc import Sequence

import torch

from fczoo.aggregators.averaging import fedavg
from fczoo.core.payload import Payload
from fczoo.core.registry import register_merge
from fczoo.core.tree import Tree, select
from fczoo.core.types import ServerAggregator


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

    What a client sent thus stays until it sends again.

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
