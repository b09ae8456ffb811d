"""Subspaces in which earlier tasks' inputs of a layer lie (GPM, Saha et al., 2021), from Gram matrices."""

import torch
from torch import Tensor


def extended(basis: Tensor, gram: Tensor, threshold: float, least: int = 0) -> Tensor:
    """An orthonormal basis [d, m + r] that holds the part ``threshold`` of the energy in ``gram``.

    ``basis`` M is [d, m]; ``gram`` G [d, d] is X X^T of the inputs X, summed over clients in any order. Added
    are the leading directions of (I - M M^T) G (I - M M^T), the fewest, but at least ``least``, for which
    the energy of X inside the basis is ``threshold`` of trace(G). All in float64.
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
    reached = energy >= threshold - 1e-12
    added = int(reached.int().argmax()) if reached.any() else len(values)
    added = min(max(added, least), len(values) - m.shape[1])
    joined: Tensor = torch.linalg.qr(torch.cat([m, vectors[:, :added]], 1)).Q
    return joined


def outside_of(change: Tensor, basis: Tensor) -> Tensor:
    """A weight's change [out, d] without its part inside the subspace: outputs for inputs in there stay."""
    m = basis.to(change)
    return change - (change @ m) @ m.mT
