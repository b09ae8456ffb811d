"""Diagonal Fisher information by per-image gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task


def fisher_sums(
    log_likelihood: Callable[[Tree, Batch], Tensor],
    params: Tree,
    batch: Batch,
    weighted: bool = True,
) -> Tree:
    """Sum p_y (d log p_y / d theta)^2 over the real images of a batch.

    Gradients are taken image by image. Thus the sum over clients is the Fisher information of their
    pooled images.

    Args:
        log_likelihood: Function of parameters and a batch with one image that returns log p_y [1].
        params: Parameters theta.
        batch: Images and their weights; padding has weight 0.
        weighted: Multiply by p_y; without it this factor is left out.

    Returns:
        Sums with the shapes of ``params``.
    """
    sums = {k: torch.zeros_like(v) for k, v in params.items()}
    for i, weight in enumerate(batch.w):  # as fast on the CPU as all at once under vmap
        image = Batch(
            batch.x[i, None], batch.y[i, None], torch.ones_like(batch.w[:1]), batch.query[i, None]
        )
        value, gradients = _value_and_gradients(log_likelihood, params, image)
        share = weight * value.exp() if weighted else weight
        for name, gradient in gradients.items():
            sums[name] += share.to(gradient) * gradient.square()
    return sums


def true_fisher_sums(
    log_likelihood: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch, task: Task
) -> Tree:
    """Sum p_c (d log p_c / d theta)^2 over the images of a batch and all classes c of a task.

    Args:
        log_likelihood: See ``fisher_sums``.
        params: Parameters theta.
        batch: Images and their weights; the labels do not count.
        task: Task whose classes share the probability.

    Returns:
        Sums with the shapes of ``params``.
    """
    sums = {k: torch.zeros_like(v) for k, v in params.items()}
    for c in range(task.start, task.stop):
        one_class = batch._replace(y=torch.full_like(batch.y, c))
        squares = fisher_sums(log_likelihood, params, one_class)
        sums = {k: v + squares[k] for k, v in sums.items()}
    return sums


def _value_and_gradients(
    log_likelihood: Callable[[Tree, Batch], Tensor], params: Tree, image: Batch
) -> tuple[Tensor, Tree]:
    """Compute log p_y of one image and its gradients.

    If clients train together (vmap), only ``torch.func`` can compute gradients. Otherwise plain
    autograd does, which avoids the import of PyTorch's compiler (one second).
    """
    if torch._C._functorch.maybe_current_level() is not None:
        gradients, value = torch.func.grad_and_value(lambda tree: log_likelihood(tree, image)[0])(
            params
        )
        return value, gradients
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    with torch.enable_grad():
        value = log_likelihood(leaves, image)[0]
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    tensors = (
        g if g is not None else torch.zeros_like(v)
        for g, v in zip(grads, leaves.values(), strict=True)
    )
    return value.detach(), dict(zip(leaves, tensors, strict=True))
