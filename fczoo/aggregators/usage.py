"""FCILPT's pools, sorted by use before they are averaged."""

from collections.abc import Sequence

from fczoo.aggregators.averaging import uniform
from fczoo.core.registry import register_aggregator
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import ServerAggregator


@register_aggregator("sort_by_usage")
def sort_by_usage(payloads: Sequence[Tree], average: ServerAggregator = uniform) -> Tree:
    """FCILPT's server step: sort every client's pool by usage, then average it rank by rank.

    Reads ``usage`` [M], ``pool.key`` [M, D] and ``pool.prompt`` [M, L, D]; the sort is stable, so equally
    used prompts keep their order.
    """
    ranked = []
    for payload in payloads:
        order = payload["usage"].argsort(descending=True, stable=True)
        pool = {k: v[order] for k, v in select(payload, "pool.").items()}
        ranked.append({**drop(payload, "usage"), **pool})
    return average(ranked)
