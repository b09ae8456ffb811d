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
    """HGP's server step: average the prompt and the head, concatenate the clients' Gaussians.

    Reads ``gauss.label`` [g], ``gauss.count`` [g], ``gauss.mean`` and ``gauss.var`` [g, D] of every
    payload; adds ``gauss.client`` [g]. The mixture of class c draws client m with pi = n_{m,c} / sum_m
    n_{m,c}.

    Source: Salami et al., section 3.2.
    """
    return collect_rows(payloads, "gauss.", average)


@register_merge("prototype_pool")
def prototype_pool(payloads: Sequence[Payload], average: ServerAggregator = fedavg) -> Tree:
    """FPPL's server step: average prompt, fusion and head, concatenate the clients' class prototypes.

    Reads ``local.label`` [p] and ``local.mean`` [p, D] of every payload; adds ``local.client`` [p].
    """
    return collect_rows(payloads, "local.", average)


def collect_rows(payloads: Sequence[Payload], prefix: str, average: ServerAggregator) -> Tree:
    """Concatenate the rows of all tensors that start with ``prefix``, and ``average`` the others.

    Adds ``PREFIXclient``, int64, the client that sent each row.
    """
    rows = {k: torch.cat([p[k] for p in payloads]) for k in payloads[0].only(prefix)}
    owner = torch.cat([torch.full_like(p[f"{prefix}label"], p.client) for p in payloads])
    return {**average([p.drop(prefix) for p in payloads]), **rows, f"{prefix}client": owner}


def keep_latest(state: Tree, merged: Tree, prefix: str) -> Tree:
    """The server's rows in ``state``, those of the same (client, label) replaced by the rows in ``merged``.

    What a client sent thus stays until it sends again.
    """
    old, new = select(state, prefix), select(merged, prefix)
    label, client = old[f"{prefix}label"], old[f"{prefix}client"]
    same_label = label[:, None] == new[f"{prefix}label"].to(label)
    same_client = client[:, None] == new[f"{prefix}client"].to(client)
    keep = ~(same_label & same_client).any(1)
    return {k: torch.cat([old[k][keep], new[k].to(old[k])]) for k in old}
