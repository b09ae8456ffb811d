"""The geodesic flow kernel between two sets of features (GeoDL; Simon et al., CVPR 2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor

ZERO = 1e-6  # principal angles and singular values below this are 0


def subspace(features: Tensor, weights: Tensor, size: Tensor | int) -> Tensor:
    """The ``size`` first left singular vectors of the features [n, D] as columns [D, n]; further ones are 0.

    Each feature is brought to length 1 and centred over its own D entries, as released code does; rows of
    weight 0 do not count.
    """
    rows = F.normalize(features, dim=-1)
    rows = (rows - rows.mean(-1, keepdim=True)) * weights[:, None]
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    place = torch.arange(len(values), device=features.device)
    kept: Tensor = vectors.mT * ((place < size) & (values > ZERO))
    return kept


def flow_kernel(old: Tensor, new: Tensor) -> Tensor:
    """G [D, D]: the integral of Phi(u) Phi(u)^T over the geodesic Phi from one subspace to the other.

    ``old``, ``new``: orthonormal columns [D, k], or zeros. With P^T Q = U cos(theta) V^T, X = P U, Y = Q V
    and Y = X cos(theta) + R sin(theta), G = X L1 X^T + X L2 R^T + R L2 X^T + R L3 R^T.
    """
    left, cosine, right = torch.linalg.svd(old.mT @ new)
    start, end = old @ left, new @ right.mT  # X, Y
    across = end - start * cosine
    sine = torch.linalg.vector_norm(across, dim=0)
    theta = torch.atan2(sine, cosine)
    small = theta < ZERO
    rest = torch.where(small, torch.zeros_like(across), across / sine.clamp(min=ZERO))  # R
    twice = torch.where(small, torch.ones_like(theta), 2 * theta)
    ratio = torch.where(small, torch.ones_like(theta), twice.sin() / twice)
    first, third = (1 + ratio) / 2, (1 - ratio) / 2  # L1, L3
    second = torch.where(small, torch.zeros_like(theta), (1 - twice.cos()) / (2 * twice))  # L2
    mixed = (start * second) @ rest.mT
    kernel: Tensor = (start * first) @ start.mT + mixed + mixed.mT + (rest * third) @ rest.mT
    return kernel


def geodesic_loss(features: Tensor, old: Tensor, kernel: Tensor, distance: bool) -> Tensor:
    """[B]: 1 - a^T G b / (|G^1/2 a| |G^1/2 b|), or (a - b)^T G (a - b) with ``distance``.

    a, b: ``old`` and new ``features`` [B, D] of length 1.
    """
    a, b = F.normalize(old, dim=-1), F.normalize(features, dim=-1)
    if distance:
        return ((a - b) @ kernel * (a - b)).sum(-1)
    inner = ((a @ kernel) * b).sum(-1)
    lengths = ((a @ kernel) * a).sum(-1) * ((b @ kernel) * b).sum(-1)
    return 1 - inner / lengths.clamp(min=torch.finfo(a.dtype).tiny).sqrt()
