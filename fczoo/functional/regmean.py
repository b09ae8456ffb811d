"""Merging of linear layers by the Gram matrices of their inputs (RegMean, LoRM)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.functional.input_subspaces import unpack_gram

# times the largest eigenvalue: directions with smaller ones count as unseen
MIN_EIGENVALUE_RATIO = 1e-6


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
        present = wide > MIN_EIGENVALUE_RATIO * wide.max()
        return torch.where(present, matrix.double() / torch.where(present, wide, 1.0), 0.0)
    inverse: Tensor = torch.linalg.pinv(
        unpack_gram(gram, size), rtol=MIN_EIGENVALUE_RATIO, hermitian=True
    )
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
