"""Tools of the tests against official implementations of the baselines.

They are a tolerance, batches and replacements for backbones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Tree


def same(ours: Tensor, official: Tensor) -> bool:
    """Check that a tensor has the shape and, within a tolerance, the values of the official one."""
    return ours.shape == official.shape and torch.allclose(
        ours.detach().to(official), official, rtol=1e-4, atol=1e-5
    )


def query_batch(x: Tensor, y: Tensor, t: Tensor | None = None) -> Batch:
    """Make a batch of images of weight 1 that are their own query features."""
    return Batch(x, y, torch.ones(len(y)), x, torch.empty(len(y), 0) if t is None else t)


def grads(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Compute the gradients of a value with respect to some tensors; zeros where it has none."""
    return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))


class Features:
    """A replacement for a backbone where the official vectors start from features."""

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images


class TanhLayer:
    """A replacement for a backbone: the hidden layer of the official checks' network.

    Its weights are plugs.
    """

    def __call__(self, images: Tensor, plugs: Tree) -> Tensor:
        return torch.tanh(F.linear(images, plugs["full.layer.weight"], plugs["full.layer.bias"]))


def network(theta: Tensor, inside: int, hidden: int, outside: int) -> Tree:
    """Split the flat vector of the official checks into named tensors.

    Args:
        theta: All weights [n].
        inside: Number of inputs.
        hidden: Width of the hidden layer.
        outside: Number of outputs.
    """
    shapes = {
        "full.layer.weight": (hidden, inside),
        "full.layer.bias": (hidden,),
        "head.weight": (outside, hidden),
        "head.bias": (outside,),
    }
    parts = theta.split([torch.Size(s).numel() for s in shapes.values()])
    return {k: v.view(s) for (k, s), v in zip(shapes.items(), parts, strict=True)}


def flat(tree: Tree) -> Tensor:
    """Join the named tensors of ``network`` into one vector."""
    return torch.cat(
        [
            tree[k].flatten()
            for k in ("full.layer.weight", "full.layer.bias", "head.weight", "head.bias")
        ]
    )
