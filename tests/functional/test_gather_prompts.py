"""Rows gathered from a prompt pool: the values of indexing, and a deterministic gradient."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fczoo.functional.prompts import gather_prompts

CLIENTS, IMAGES, CHOSEN, POOL, LENGTH, DIM = 3, 16, 5, 10, 5, 192


@pytest.fixture
def two_threads() -> Iterator[None]:
    thread_count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(thread_count)


def pool_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables and weights of three clients, and positions that repeat."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randn(CLIENTS, POOL, LENGTH, DIM, generator=rng, dtype=dtype)
    index = torch.randint(POOL, (CLIENTS, IMAGES, CHOSEN), generator=rng)
    weight = torch.randn(CLIENTS, IMAGES, CHOSEN, LENGTH, DIM, generator=rng, dtype=dtype)
    return table, index, weight


def gradient(gather, table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a loss over stacked clients, as the engine computes it."""
    leaf = table.clone().requires_grad_()
    torch.vmap(lambda t, i, w: (gather(t, i) * w).sum())(leaf, index, weight).sum().backward()
    return leaf.grad


def test_gather_prompts_matches_indexing() -> None:
    table, index, weight = pool_tensors(torch.float64)
    for t, i in zip(table, index, strict=True):
        assert torch.equal(gather_prompts(t, i), t[i])
    assert torch.equal(gather_prompts(table[0], index[0, 0, 0]), table[0, index[0, 0, 0]])
    by_indexing = gradient(lambda t, i: t[i], table, index, weight)
    torch.testing.assert_close(
        gradient(gather_prompts, table, index, weight), by_indexing, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_gradient_is_deterministic(two_threads: None, clients: int) -> None:
    tensors = [part[:clients] for part in pool_tensors(torch.float32)]
    first = gradient(gather_prompts, *tensors)
    assert all(torch.equal(gradient(gather_prompts, *tensors), first) for _ in range(50))
