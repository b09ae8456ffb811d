"""What the tests against official implementations of the baselines share: tolerance, batches, stand-ins."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Tree


def same(ours: Tensor, official: Tensor) -> bool:
    return ours.shape == official.shape and torch.allclose(
        ours.detach().to(official), official, rtol=1e-4, atol=1e-5
    )


def whole(x: Tensor, y: Tensor, t: Tensor | None = None) -> Batch:
    return Batch(x, y, torch.ones(len(y)), x, torch.empty(len(y), 0) if t is None else t)


def grads(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))


class Features:
    """Stands in for a backbone where the official vectors start from features."""

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images


class TanhLayer:
    """Stands in for a backbone: the hidden layer of the official checks' network, its weights as plugs."""

    def __call__(self, images: Tensor, plugs: Tree) -> Tensor:
        return torch.tanh(F.linear(images, plugs["full.layer.weight"], plugs["full.layer.bias"]))


def network(theta: Tensor, inside: int, hidden: int, outside: int) -> Tree:
    """The flat vector of the official checks as named tensors."""
    shapes = {
        "full.layer.weight": (hidden, inside),
        "full.layer.bias": (hidden,),
        "head.weight": (outside, hidden),
        "head.bias": (outside,),
    }
    parts = theta.split([torch.Size(s).numel() for s in shapes.values()])
    return {k: v.view(s) for (k, s), v in zip(shapes.items(), parts, strict=True)}


def flat(tree: Tree) -> Tensor:
    return torch.cat(
        [tree[k].flatten() for k in ("full.layer.weight", "full.layer.bias", "head.weight", "head.bias")]
    )
