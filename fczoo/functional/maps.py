"""Distances between what two models have inside, block by block (PODNet, AFC)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone


def quarters(depth: int) -> list[str]:
    """Taps at the outputs of blocks L/4, L/2, 3L/4 and L, in place of a ResNet's stages."""
    return [f"blocks.{i}" for i in sorted({max(round(depth * part / 4), 1) - 1 for part in range(1, 5)})]


def patch_maps(
    backbone: Backbone, images: Tensor, plugs: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Features [B, D], and of each of ``quarters`` the map [B, D, s, s] of its patch tokens."""
    features, seen = backbone.tapped(images, quarters(backbone.depth), plugs)
    side = backbone.config.image_size // backbone.config.patch_size
    return features, [tokens[:, 1:].mT.unflatten(-1, (side, side)) for tokens in seen.values()]


def spatial_distance(old: Tensor, new: Tensor) -> Tensor:
    """POD [B] of maps [B, C, W, H]: squared, summed over height and over width, then of length 1."""
    pooled = []
    for squares in (old.square(), new.square()):
        sums = torch.cat([squares.sum(3).flatten(1), squares.sum(2).flatten(1)], 1)
        pooled.append(F.normalize(sums, dim=-1))
    return _length(pooled[0] - pooled[1])


def channel_distance(old: Tensor, new: Tensor, importance: Tensor) -> Tensor:
    """AFC's distance [B] of maps [B, C, W, H], weighted by the ``importance`` [C] of each channel.

    Each channel is squared and brought to length 1 over its positions; mean over channels.
    """
    first, second = (F.normalize(maps.square().flatten(2), dim=-1) for maps in (old, new))
    weighted: Tensor = importance * _length(first - second)
    return weighted.mean(-1)


def _length(difference: Tensor) -> Tensor:
    """Length of the last dimension; 0, with gradient 0, where it is rounding.

    As long as student and teacher are one, the gradient of their distance would be the direction of the
    rounding, at full length.
    """
    found: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return torch.where(found > 1e3 * torch.finfo(found.dtype).eps, found, torch.zeros_like(found))
