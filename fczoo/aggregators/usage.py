"""FCILPT's pools, sorted by use before they are averaged."""

from collections.abc import Sequence

from fczoo.aggregators.averaging import uniform
from fczoo.core.payload import Payload
from fczoo.core.registry import register_merge
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator


@register_merge("sort_by_usage")
def sort_by_usage(payloads: Sequence[Payload], average: ServerAggregator = uniform) -> Tree:
    """FCILPT's server step: sort every client's pool by usage, then average it rank by rank.

    Reads ``usage`` [M], ``pool.key`` [M, D] and ``pool.prompt`` [M, L, D]; the sort is stable, so equally
    used prompts keep their order.
    """
    ranked = []
    for payload in payloads:
        order = payload["usage"].argsort(descending=True, stable=True)
        pool = {k: v[order] for k, v in payload.only("pool.").items()}
        ranked.append(payload.holding({**payload.drop("usage"), **pool}))
    return average(ranked)
