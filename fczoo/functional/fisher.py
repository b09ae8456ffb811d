"""Diagonal Fisher information by per-image gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch


def fisher_sums(
    log_likelihood: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch, weighted: bool = True
) -> Tree:
    """Sum over the real images of p_y (d log p_y / d theta)^2, of the shapes of ``params``.

    Without ``weighted`` the factor p_y is left out.
    ``log_likelihood(params, batch)`` is log p_y [1] of a batch of one image. Gradients are taken image by
    image, so that the sum over clients is the Fisher of their pooled images.
    """
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    sums = {k: torch.zeros_like(v) for k, v in leaves.items()}
    for i, weight in enumerate(batch.w):  # as fast on the CPU as all at once under vmap
        image = Batch(batch.x[i, None], batch.y[i, None], torch.ones_like(batch.w[:1]), batch.query[i, None])
        with torch.enable_grad():
            value = log_likelihood(leaves, image)[0]
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        share = weight * value.detach().exp() if weighted else weight
        for total, gradient in zip(sums.values(), gradients, strict=True):
            if gradient is not None:
                total += share.to(total) * gradient.square()
    return sums
