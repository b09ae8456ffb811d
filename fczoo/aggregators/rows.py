"""Rows of class statistics, put side by side."""

from collections.abc import Sequence

import torch

from fczoo.aggregators.averaging import fedavg
from fczoo.core.registry import register_aggregator
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import ServerAggregator


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


def collect_rows(payloads: Sequence[Tree], prefix: str, average: ServerAggregator) -> Tree:
    """Average what does not start with ``prefix``; concatenate the rows of what does, and note whose each row is."""
    rows = {k: torch.cat([p[k] for p in payloads]) for k in select(payloads[0], prefix)}
    owner = torch.cat([p["client"].expand(len(p[f"{prefix}label"])) for p in payloads])
    return {**average([drop(p, prefix) for p in payloads]), **rows, f"{prefix}client": owner}


def keep_latest(state: Tree, merged: Tree, prefix: str) -> Tree:
    """Rows that the server holds, those of the same (client, label) replaced: what a client sent stays until it sends again."""
    old, new = select(state, prefix), select(merged, prefix)
    label, client = old[f"{prefix}label"], old[f"{prefix}client"]
    same = (label[:, None] == new[f"{prefix}label"].to(label)) & (
        client[:, None] == new[f"{prefix}client"].to(client)
    )
    keep = ~same.any(1)
    return {k: torch.cat([old[k][keep], new[k].to(old[k])]) for k in old}
