"""Gram matrices of linear layers' inputs, and the subspaces that hold their energy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fczoo.core.tree import Tree


def layer_grams(inputs: Mapping[str, Tensor], weight: Tensor, gamma: float) -> Tree:
    """Compute gamma G + (1 - gamma) diag(G) of each layer's inputs.

    G is the sum of x x^T over all tokens x of real images. Of this symmetric matrix the upper
    triangle is stored, row by row.

    Args:
        inputs: Inputs [B, N, d] or [B, d] of each layer.
        weight: Weights [B] of the images; padding has weight 0.
        gamma: Factor on the entries off the diagonal.

    Returns:
        ``gram.LAYER`` [d (d + 1) / 2]; with ``gamma`` 0 only the diagonal [d].
    """
    grams: Tree = {}
    for layer, value in inputs.items():
        x = value.to(torch.promote_types(value.dtype, torch.float32))
        x = x if x.dim() == 3 else x[:, None]
        rows = x * weight[:, None, None].to(x)
        diagonal = (rows * x).sum((0, 1))
        if not gamma:
            grams[f"gram.{layer}"] = diagonal
            continue
        full = gamma * (rows.flatten(0, 1).mT @ x.flatten(0, 1)) + (1 - gamma) * torch.diag(
            diagonal
        )
        i, j = torch.triu_indices(*full.shape, device=x.device)
        grams[f"gram.{layer}"] = full[i, j]
    return grams


def unpack_gram(gram: Tensor, size: int) -> Tensor:
    """Unpack a Gram matrix of ``layer_grams``.

    Args:
        gram: Upper triangle [d (d + 1) / 2] or diagonal [d].
        size: Dimension d.

    Returns:
        G [d, d] in float64.
    """
    gram = gram.double()
    if len(gram) == size:
        return torch.diag(gram)
    i, j = torch.triu_indices(size, size, device=gram.device)
    full = gram.new_zeros(size, size)
    full[i, j] = gram
    full[j, i] = gram
    return full


def extend_basis(basis: Tensor, gram: Tensor, threshold: float, least: int = 0) -> Tensor:
    """Extend an orthonormal basis until it holds the share ``threshold`` of the energy in ``gram``.

    It adds the leading directions of (I - M M^T) G (I - M M^T). Their number is the smallest for
    which the energy of X inside the basis is ``threshold`` of trace(G), but at least ``least``.

    Args:
        basis: M [d, m].
        gram: G [d, d], which is X X^T of the inputs X, summed over clients in any order.
        threshold: Share of the energy, 0 to 1.
        least: Minimum number of new directions.

    Returns:
        The basis [d, m + r] in float64.
    """
    m, g = basis.double(), gram.double()
    inside = m.mT @ g
    outside = g - m @ inside - (m @ inside).mT + m @ (inside @ m) @ m.mT
    values, vectors = torch.linalg.eigh(outside)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    total = g.trace()
    if total <= 0:
        return m
    energy = ((inside @ m).trace() + torch.cat([values.new_zeros(1), values.cumsum(0)])) / total
    sufficient = energy >= threshold - 1e-12
    number = int(sufficient.int().argmax()) if sufficient.any() else len(values)
    number = min(max(number, least), len(values) - m.shape[1])
    result: Tensor = torch.linalg.qr(torch.cat([m, vectors[:, :number]], 1)).Q
    return result


def remove_subspace(change: Tensor, basis: Tensor) -> Tensor:
    """Remove the part inside a subspace from a weight's change.

    Outputs for inputs in the subspace do not change.

    Args:
        change: Change [out, d] of a weight.
        basis: Orthonormal basis [d, m] of the subspace.

    Returns:
        The remaining change [out, d].
    """
    m = basis.to(change)
    return change - (change @ m) @ m.mT
