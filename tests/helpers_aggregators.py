"""Uploads for the tests of aggregators, and their comparison."""

from collections.abc import Mapping, Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Payload, Tree

some = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)
clients = st.integers(1, 6)


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def copy(payloads: Sequence[Payload]) -> list[Payload]:
    return [p.holding({k: v.clone() for k, v in p.items()}) for p in payloads]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Check that two trees have the same names and equal tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    """Check that two tensors are equal within a tolerance, relative and absolute."""
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def prototypes(rng: torch.Generator) -> Tree:
    """Draw an upload of prototype_reweight.

    Args:
        rng: Source of the draws.

    Returns:
        ``prototype`` and ``class.mean`` [4, 6] and ``class.count`` [4], of four classes.
    """
    counts = torch.randint(0, 3, (4,), generator=rng)
    return {
        "prototype": normal(rng, 4, 6),
        "class.count": counts.double(),
        "class.mean": normal(rng, 4, 6) * (counts > 0)[:, None],
    }


def gaussian_rows(rng: torch.Generator) -> Tree:
    """Draw an upload of gaussian_mixture.

    Args:
        rng: Source of the draws.

    Returns:
        ``gauss.label`` and ``gauss.count`` [n], ``gauss.mean`` and ``gauss.var`` [n, 3]; n is 0 to
        3.
    """
    count = int(torch.randint(0, 4, (), generator=rng))
    labels = torch.randperm(6, generator=rng)[:count]
    return {
        "gauss.label": labels,
        "gauss.count": labels.double() + 1,
        "gauss.mean": normal(rng, count, 3),
        "gauss.var": normal(rng, count, 3).abs(),
    }


def prototype_rows(rng: torch.Generator) -> Tree:
    """Draw an upload of prototype_pool.

    Args:
        rng: Source of the draws.

    Returns:
        ``local.label`` [n] and ``local.mean`` [n, 3]; n is 0 to 3.
    """
    count = int(torch.randint(0, 4, (), generator=rng))
    return {
        "local.label": torch.randperm(6, generator=rng)[:count],
        "local.mean": normal(rng, count, 3),
    }


def prompt_pool(rng: torch.Generator) -> Tree:
    """Draw an upload of sort_by_usage.

    Args:
        rng: Source of the draws.

    Returns:
        ``usage`` [5], ``pool.key`` [5, 3] and ``pool.prompt`` [5, 2, 3].
    """
    usage = torch.randint(0, 4, (5,), generator=rng).double()
    return {"usage": usage, "pool.key": normal(rng, 5, 3), "pool.prompt": normal(rng, 5, 2, 3)}
