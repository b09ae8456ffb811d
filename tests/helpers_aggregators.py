"""What the tests of aggregators share: what uploads hold beside parameters, and how to compare them."""

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
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def prototypes(rng: torch.Generator) -> Tree:
    counts = torch.randint(0, 3, (4,), generator=rng)
    return {
        "prototype": normal(rng, 4, 6),
        "class.count": counts.double(),
        "class.mean": normal(rng, 4, 6) * (counts > 0)[:, None],
    }


def gaussian_rows(rng: torch.Generator) -> Tree:
    held = int(torch.randint(0, 4, (), generator=rng))
    labels = torch.randperm(6, generator=rng)[:held]
    return {
        "gauss.label": labels,
        "gauss.count": labels.double() + 1,
        "gauss.mean": normal(rng, held, 3),
        "gauss.var": normal(rng, held, 3).abs(),
    }


def prototype_rows(rng: torch.Generator) -> Tree:
    held = int(torch.randint(0, 4, (), generator=rng))
    return {"local.label": torch.randperm(6, generator=rng)[:held], "local.mean": normal(rng, held, 3)}


def prompt_pool(rng: torch.Generator) -> Tree:
    usage = torch.randint(0, 4, (5,), generator=rng).double()
    return {"usage": usage, "pool.key": normal(rng, 5, 3), "pool.prompt": normal(rng, 5, 2, 3)}
