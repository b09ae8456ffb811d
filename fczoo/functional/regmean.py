"""Gram matrices of linear layers' inputs, and merging of layers by them (RegMean)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fczoo.core.tree import Tree

SMALLEST = 1e-6  # times the largest eigenvalue: directions with smaller ones count as unseen


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


def multiply_gram(matrix: Tensor, gram: Tensor) -> Tensor:
    """Multiply a matrix X by a Gram matrix G.

    Args:
        matrix: X [out, d].
        gram: G as stored by ``layer_grams``.

    Returns:
        X G [out, d] in float64.
    """
    size = matrix.shape[1]
    wide = matrix.double()
    return wide * gram.double() if len(gram) == size else wide @ unpack_gram(gram, size)


def divide_by_gram(matrix: Tensor, gram: Tensor) -> Tensor:
    """Multiply a matrix X by the pseudo-inverse G^+ of a Gram matrix.

    Args:
        matrix: X [out, d].
        gram: G as stored by ``layer_grams``.

    Returns:
        X G^+ [out, d] in float64. Directions that are almost absent from G become 0.
    """
    size = matrix.shape[1]
    if len(gram) == size:
        wide = gram.double()
        present = wide > SMALLEST * wide.max()
        return torch.where(present, matrix.double() / torch.where(present, wide, 1.0), 0.0)
    inverse: Tensor = torch.linalg.pinv(unpack_gram(gram, size), rtol=SMALLEST, hermitian=True)
    return matrix.double() @ inverse


def regression_mean(weights: Sequence[Tensor], grams: Sequence[Tensor]) -> Tensor:
    """Merge weights by regression: W = (sum W_k G_k) (sum G_k)^+.

    W is nearest to each client's outputs on that client's inputs. Jin et al., "Dataless Knowledge
    Fusion by Merging Weights of Language Models" (RegMean), ICLR 2023. Solved in float64.

    Args:
        weights: Weights W_k [out, in] of the clients.
        grams: Their Gram matrices G_k as stored by ``layer_grams``.

    Returns:
        The merged weight [out, in].
    """
    total = torch.stack([multiply_gram(w, g) for w, g in zip(weights, grams, strict=True)]).sum(0)
    return divide_by_gram(total, torch.stack([g.double() for g in grams]).sum(0)).to(weights[0])


def regression_mean_of_b(ups: Tensor, down: Tensor, grams: Tensor) -> Tensor:
    """Merge the B matrices of LoRA pairs with a common A by regression.

    The outputs of B A are nearest to those of each B_k A on that client's inputs: B = (sum_k B_k A
    G_k) A^T (A (sum_k G_k) A^T)^+ (LoRM, Salami et al., 2025).

    Args:
        ups: Matrices B_k [K, out, r] of the clients.
        down: The common A [r, in].
        grams: Gram matrices G_k as stored by ``layer_grams``.

    Returns:
        B [out, r].
    """
    wide = down.double()
    total = torch.stack(
        [up.double() @ multiply_gram(wide, gram) for up, gram in zip(ups, grams, strict=True)]
    ).sum(0)
    inverse: Tensor = torch.linalg.pinv(
        multiply_gram(wide, grams.double().sum(0)) @ wide.mT, hermitian=True
    )
    return (total @ wide.mT @ inverse).to(ups)


def regression_means(payloads: Sequence[Mapping[str, Tensor]], layers: Mapping[str, str]) -> Tree:
    """Merge several weights by ``regression_mean``.

    Args:
        payloads: Uploads of the clients, with the weights and ``gram.LAYER``.
        layers: For each weight the layer with its inputs.

    Returns:
        The merged weights.
    """
    return {
        name: regression_mean([p[name] for p in payloads], [p[f"gram.{layer}"] for p in payloads])
        for name, layer in layers.items()
    }


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
