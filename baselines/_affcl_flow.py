"""Conditional normalising flow of AF-FCL, as functions of named tensors.

Four affine couplings, conditioned on the class, map a feature x to a code u ~ N(0, I).
``permutation`` [L, D] in the state permutes the dimensions before each coupling; it is the same for
all clients and never trained.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree

COUPLINGS = 4
BLOCKS = 2  # residual blocks of a coupling's network
LEAST_SCALE = 1e-3
Space = Literal["latent", "feature", "mixed"]


def start_flow(dim: int, classes: int, hidden: int, rng: torch.Generator) -> Tree:
    """Create the tensors of the flow.

    Linear layers start as in PyTorch; the last one of each residual block starts near zero.

    Args:
        dim: Dimension D of the features.
        classes: Classes C of the run.
        hidden: Width of the couplings' networks.
        rng: Random generator.

    Returns:
        ``flow.L.*``, which clients train, and ``permutation`` [4, D].
    """
    half = dim // 2  # dimensions that a coupling does not change
    flow: Tree = {}
    for coupling in range(COUPLINGS):
        name = f"flow.{coupling}"
        flow |= linear_layer(f"{name}.first", half + classes, hidden, rng)
        for block in range(BLOCKS):
            flow |= linear_layer(f"{name}.{block}.inner", hidden, hidden, rng)
            flow |= linear_layer(f"{name}.{block}.outer", hidden, hidden, rng, bound=1e-3)
            flow |= linear_layer(f"{name}.{block}.gate", classes, hidden, rng)
        flow |= linear_layer(f"{name}.last", hidden, 2 * (dim - half), rng)
    reverse = torch.arange(dim).flip(0)
    orders = [reverse, reverse, torch.randperm(dim, generator=rng)]
    return {**flow, "permutation": torch.stack([*orders, torch.randperm(dim, generator=rng)])}


def linear_layer(
    name: str, inputs: int, outputs: int, rng: torch.Generator, bound: float | None = None
) -> Tree:
    """Create weight and bias of a linear layer.

    Args:
        name: Name of the layer.
        inputs: Number of inputs.
        outputs: Number of outputs.
        rng: Random generator.
        bound: Largest absolute value; None: that of PyTorch, 1 / sqrt(inputs).
    """
    bound = bound or 1 / math.sqrt(inputs)
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return {
        f"{name}.{part}": torch.empty(shape).uniform_(-bound, bound, generator=rng)
        for part, shape in shapes.items()
    }


def encode(flow: Tree, permutation: Tensor, features: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """Transform features into codes.

    Args:
        flow: Tensors of the flow.
        permutation: Orders of the dimensions [L, D].
        features: Features [B, D].
        hot: Classes, one-hot [B, C].

    Returns:
        Codes [B, D] and log-densities of the features [B].
    """
    # Couplings: permute, keep the first half, map the second half b to b s + m.
    codes, log_scales = features, features.new_zeros(len(features))
    for name, order in _couplings(permutation):  # b -> b s + m: log-determinant sum log s
        first, second = _halves(codes[:, order])
        shift, scale = _shift_and_scale(flow, name, first, hot)
        codes = torch.cat([first, second * scale + shift], 1)
        log_scales = log_scales + scale.log().sum(1)
    # Density: log p(x | y) = log N(u; 0, I) + sum log s.
    log_normal = -0.5 * (codes.square().sum(1) + codes.shape[1] * math.log(2 * math.pi))
    return codes, log_normal + log_scales


def decode(flow: Tree, permutation: Tensor, codes: Tensor, hot: Tensor) -> Tensor:
    """Transform codes into features; the inverse of ``encode``.

    Args:
        flow: Tensors of the flow.
        permutation: Orders of the dimensions [L, D].
        codes: Codes [B, D].
        hot: Classes, one-hot [B, C].

    Returns:
        Features [B, D].
    """
    features = codes
    # Invert the couplings in reverse order: b = (b' - m) / s, then undo the permutation.
    for name, order in reversed([*_couplings(permutation)]):
        first, second = _halves(features)
        shift, scale = _shift_and_scale(flow, name, first, hot)
        features = torch.cat([first, (second - shift) / scale], 1)[:, order.argsort()]
    return features


def _couplings(permutation: Tensor) -> Iterator[tuple[str, Tensor]]:
    return ((f"flow.{number}", order) for number, order in enumerate(permutation))


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]


def _shift_and_scale(flow: Tree, name: str, half: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the shift and the scale [B, D - D // 2] of a coupling's second half."""

    def linear(part: str, rows: Tensor) -> Tensor:
        return F.linear(rows, flow[f"{name}.{part}.weight"], flow[f"{name}.{part}.bias"])

    # Residual network of the first half and the class, which gates each block. Its outputs are m
    # and o, with s = sigmoid(o + 2) + 0.001.
    hidden = linear("first", torch.cat([half, hot], 1))
    for block in range(BLOCKS):
        inner = linear(f"{block}.inner", F.leaky_relu(hidden))
        outer = linear(f"{block}.outer", F.leaky_relu(inner))
        hidden = hidden + outer * linear(f"{block}.gate", hot).sigmoid()
    shift, scale = linear("last", hidden).chunk(2, 1)
    return shift, (scale + 2).sigmoid() + LEAST_SCALE


def mix_rows(noise: Tensor, draws: Tensor) -> Tensor:
    """Return standard normal vectors [B, D]: sums of two table rows, divided by sqrt 2.

    A loss does not draw random numbers, and the number of ``draws`` cannot depend on D.

    Args:
        noise: Table of standard normal vectors [M, D].
        draws: Uniform numbers [B, 2] that choose the rows.
    """
    first, second = (draws * len(noise)).long().unbind(1)
    return (noise[first] + noise[second]) / 2**0.5


def credibility(
    flow: Tree,
    permutation: Tensor,
    features: Tensor,
    members: Tensor,
    replayed: tuple[Tensor, Tensor, Tensor],
    space: Space,
) -> tuple[Tensor, Tensor]:
    """Compute the credibility w of replayed features, and q of the client's features.

    Args:
        flow: Tensors of the flow.
        permutation: Orders of the dimensions [L, D].
        features: The client's features [n, D].
        members: Their classes, one-hot [n, C], times the weights of the images.
        replayed: Codes [B, D], features [B, D] and labels [B] of the replay.
        space: ``latent`` evaluates replayed codes under a normal fit to the client's codes of the
            class; ``feature`` features under a fit to features; ``mixed`` (released code) features
            under the fit to codes.

    Returns:
        w [B], the mean over dimensions of the density, and q, a scalar, the mean density per
            dimension of the client's features. w is q for a class without images at the client or,
            unless ``mixed``, with a single one, whose variance is 0.
    """
    codes, points, labels = replayed
    local, log_density = encode(flow, permutation, features, members)
    # q: exp(log p(x | y) / D), mean over the client's images in the batch.
    per_image = (log_density / features.shape[1]).exp() * members.sum(1)
    q = per_image.sum() / members.sum().clamp(min=1)
    local = features if space == "feature" else local
    points = codes if space == "latent" else points
    # w: density of N(mu_c, v_c) at the replayed point, mean over dimensions; mu_c and v_c are mean
    # and variance over the client's images of that class.
    count = members.sum(0)[:, None]
    mean = members.mT @ local / count.clamp(min=1)
    offset = (local - members @ mean).square()
    variance = members.mT @ offset / count.clamp(min=1) + 1e-30
    mean, variance = mean[labels], variance[labels]
    exponent = -(points - mean).square() / (2 * variance)
    per_dim = exponent.exp() / (2 * math.pi * variance).sqrt()
    least = 1 if space == "mixed" else 2
    return torch.where(count[labels, 0] >= least, per_dim.mean(1), q), q
