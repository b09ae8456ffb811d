"""Diagonal Fisher information by per-image gradients."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fczoo.core.tree import Tree
from fczoo.core.types import Batch

SCALARS = 2**26  # gradients held at once, in scalars: 256 MiB in float32


def fisher_sums(
    log_likelihood: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch, weighted: bool = True
) -> Tree:
    """Sum over the real images of p_y (d log p_y / d theta)^2, of the shapes of ``params``.

    Without ``weighted`` the factor p_y is left out.
    ``log_likelihood(params, batch)`` is log p_y [1] of a batch of one image. Gradients are taken image by
    image, as many at once as ``SCALARS`` allows, so that the sum over clients is the Fisher of their
    pooled images.
    """

    def single(tree: Tree, x: Tensor, y: Tensor, q: Tensor) -> Tensor:
        return log_likelihood(tree, Batch(x[None], y[None], torch.ones_like(batch.w[:1]), q[None]))[0]

    per_image = vmap(grad_and_value(single), in_dims=(None, 0, 0, 0))
    rows = max(1, SCALARS // sum(v.numel() for v in params.values()))
    sums = {k: torch.zeros_like(v) for k, v in params.items()}
    for x, y, w, q in zip(
        *(part.split(rows) for part in (batch.x, batch.y, batch.w, batch.query)), strict=True
    ):
        gradients, value = per_image(params, x, y, q)
        weight = w * value.exp() if weighted else w
        for name, gradient in gradients.items():
            sums[name] += torch.einsum("b,b...->...", weight.to(gradient), gradient.square())
    return sums
