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
    sums = {k: torch.zeros_like(v) for k, v in params.items()}
    for i, weight in enumerate(batch.w):  # as fast on the CPU as all at once under vmap
        image = Batch(batch.x[i, None], batch.y[i, None], torch.ones_like(batch.w[:1]), batch.query[i, None])
        value, gradients = _value_and_gradients(log_likelihood, params, image)
        share = weight * value.exp() if weighted else weight
        for name, gradient in gradients.items():
            sums[name] += share.to(gradient) * gradient.square()
    return sums


def _value_and_gradients(
    log_likelihood: Callable[[Tree, Batch], Tensor], params: Tree, image: Batch
) -> tuple[Tensor, Tree]:
    """log p_y of one image, and its gradients.

    Where clients train together (vmap) only ``torch.func`` knows gradients; elsewhere plain ones do, which
    spare the import of PyTorch's compiler, a second.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        gradients, value = torch.func.grad_and_value(lambda tree: log_likelihood(tree, image)[0])(params)
        return value, gradients
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    with torch.enable_grad():
        value = log_likelihood(leaves, image)[0]
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    filled = (
        g if g is not None else torch.zeros_like(v) for g, v in zip(found, leaves.values(), strict=True)
    )
    return value.detach(), dict(zip(leaves, filled, strict=True))
