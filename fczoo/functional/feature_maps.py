"""Distances between the internal feature maps of two models, block by block (PODNet, AFC)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone


def quarter_taps(depth: int) -> list[str]:
    """Return the names of taps at the outputs of blocks L/4, L/2, 3L/4 and L.

    They replace the stages of a ResNet.

    Args:
        depth: Number L of blocks.

    Returns:
        Names ``blocks.{i}`` in order, without duplicates.
    """
    return [
        f"blocks.{i}" for i in sorted({max(round(depth * part / 4), 1) - 1 for part in range(1, 5)})
    ]


def patch_maps(
    backbone: Backbone, images: Tensor, plugs: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute features and the maps of patch tokens at each of ``quarter_taps``.

    Args:
        backbone: The frozen backbone.
        images: Images [B, 3, H, W].
        plugs: Tensors to insert into the backbone, such as LoRA pairs.

    Returns:
        Features [B, D] and one map [B, D, s, s] per tap; s is the number of patches per side.
    """
    features, outputs = backbone.features_and_taps(images, quarter_taps(backbone.depth), plugs)
    first, side = backbone.config.prefix_tokens, backbone.config.grid
    return features, [
        tokens[:, first:].mT.unflatten(-1, (side, side)) for tokens in outputs.values()
    ]


def spatial_distance(old: Tensor, new: Tensor) -> Tensor:
    """Compute the spatial POD distance of two feature maps.

    The squared maps are summed over height and over width, then normalised to length 1.

    Args:
        old: Maps [B, C, W, H] of the old model.
        new: Maps [B, C, W, H] of the new model.

    Returns:
        Distances [B].
    """
    sides = []
    for squares in (old.square(), new.square()):
        sums = torch.cat([squares.sum(3).flatten(1), squares.sum(2).flatten(1)], 1)
        sides.append(F.normalize(sums, dim=-1))
    return _length(sides[0] - sides[1])


def channel_distance(old: Tensor, new: Tensor, importance: Tensor) -> Tensor:
    """Compute the distance of AFC between two feature maps, weighted by channel importance.

    Each channel is squared and normalised to length 1 over its positions. The result is the mean
    over channels.

    Args:
        old: Maps [B, C, W, H] of the old model.
        new: Maps [B, C, W, H] of the new model.
        importance: Importance [C] of each channel.

    Returns:
        Distances [B].
    """
    first, second = (F.normalize(maps.square().flatten(2), dim=-1) for maps in (old, new))
    distances: Tensor = importance * _length(first - second)
    return distances.mean(-1)


def _length(difference: Tensor) -> Tensor:
    """Compute the length of the last dimension; 0, with gradient 0, if it is only rounding.

    While student and teacher are identical, the gradient of their distance would be the direction
    of the rounding, at full length.
    """
    length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return torch.where(
        length > 1e3 * torch.finfo(length.dtype).eps, length, torch.zeros_like(length)
    )
