"""Gram matrices of what linear layers read, and merging of layers by them (RegMean)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fczoo.core.tree import Tree

SMALLEST = 1e-6  # eigenvalue, times the largest, below which a direction counts as never seen


def layer_grams(inputs: Mapping[str, Tensor], weight: Tensor, gamma: float) -> Tree:
    """``gram.LAYER``: gamma G + (1 - gamma) diag(G); G is the sum of x x^T over all tokens x of real images.

    ``inputs`` are [B, N, d] or [B, d] a layer, ``weight`` [B] is 0 for padding. Of a symmetric matrix the
    upper triangle is kept, row by row [d (d + 1) / 2]; with ``gamma`` 0 the diagonal alone [d].
    """
    grams: Tree = {}
    for layer, value in inputs.items():
        x = value.to(torch.promote_types(value.dtype, torch.float32))
        x = x if x.dim() == 3 else x[:, None]
        weighted = x * weight[:, None, None].to(x)
        diagonal = (weighted * x).sum((0, 1))
        if not gamma:
            grams[f"gram.{layer}"] = diagonal
            continue
        full = gamma * (weighted.flatten(0, 1).mT @ x.flatten(0, 1)) + (1 - gamma) * torch.diag(diagonal)
        i, j = torch.triu_indices(*full.shape, device=x.device)
        grams[f"gram.{layer}"] = full[i, j]
    return grams


def unpacked(gram: Tensor, size: int) -> Tensor:
    """G [d, d] in float64 of what ``layer_grams`` made."""
    gram = gram.double()
    if len(gram) == size:
        return torch.diag(gram)
    i, j = torch.triu_indices(size, size, device=gram.device)
    full = gram.new_zeros(size, size)
    full[i, j] = gram
    full[j, i] = gram
    return full


def times(matrix: Tensor, gram: Tensor) -> Tensor:
    """X G [out, d] in float64 of X [out, d] and what ``layer_grams`` made."""
    size = matrix.shape[1]
    wide = matrix.double()
    return wide * gram.double() if len(gram) == size else wide @ unpacked(gram, size)


def over(matrix: Tensor, gram: Tensor) -> Tensor:
    """X G^+ [out, d] in float64; directions of which G has seen almost nothing come out 0."""
    size = matrix.shape[1]
    if len(gram) == size:
        wide = gram.double()
        seen = wide > SMALLEST * wide.max()
        return torch.where(seen, matrix.double() / torch.where(seen, wide, 1.0), 0.0)
    inverse: Tensor = torch.linalg.pinv(unpacked(gram, size), rtol=SMALLEST, hermitian=True)
    return matrix.double() @ inverse


def regression_mean(weights: Sequence[Tensor], grams: Sequence[Tensor]) -> Tensor:
    """W [out, in] = (sum W_k G_k) (sum G_k)^+: nearest to each client's outputs on that client's inputs.

    Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models" (RegMean), ICLR 2023. Solved
    in float64; ``grams`` are what ``layer_grams`` made.
    """
    total = torch.stack([times(w, g) for w, g in zip(weights, grams, strict=True)]).sum(0)
    return over(total, torch.stack([g.double() for g in grams]).sum(0)).to(weights[0])


def regression_mean_of_b(ups: Tensor, down: Tensor, grams: Tensor) -> Tensor:
    """B [out, r] for which the outputs of B A are nearest to those of each B_k A on that client's inputs.

    B = (sum_k B_k A G_k) A^T (A (sum_k G_k) A^T)^+, of B_k [K, out, r], one A [r, in], and what
    ``layer_grams`` made (LoRM, Salami et al., 2025).
    """
    wide = down.double()
    total = torch.stack([up.double() @ times(wide, gram) for up, gram in zip(ups, grams, strict=True)]).sum(0)
    inverse: Tensor = torch.linalg.pinv(times(wide, grams.double().sum(0)) @ wide.mT, hermitian=True)
    return (total @ wide.mT @ inverse).to(ups)


def regression_means(payloads: Sequence[Mapping[str, Tensor]], layers: Mapping[str, str]) -> Tree:
    """``regression_mean`` of several weights; ``layers`` names the layer whose inputs each weight reads."""
    return {
        name: regression_mean([p[name] for p in payloads], [p[f"gram.{layer}"] for p in payloads])
        for name, layer in layers.items()
    }
