"""Pixels of images before and after normalisation."""

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.types import Batch


def raw_images(backbone: Backbone, batch: Batch) -> Batch:
    """Return the batch with pixels in [0, 1], without normalisation.

    Released code computes its statistics from such pixels.

    Args:
        backbone: The backbone for which the images are normalised.
        batch: Normalised images.

    Returns:
        The batch with new pixels.
    """
    mean, std = _channels(backbone, batch.x)
    return batch._replace(x=batch.x * std + mean)


def normalise_images(backbone: Backbone, images: Tensor) -> Tensor:
    """Normalise images for the backbone.

    Args:
        backbone: The backbone, with its input mean and standard deviation.
        images: Images [B, 3, H, W] with pixels in [0, 1].

    Returns:
        Normalised images [B, 3, H, W].
    """
    mean, std = _channels(backbone, images)
    return (images - mean) / std


def _channels(backbone: Backbone, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the backbone's input mean and standard deviation, [1, 3, 1, 1] each."""
    values = (backbone.config.mean, backbone.config.std)
    # create them on the images' device: a copy from the host would wait for the device
    mean, std = (
        torch.cat([images.new_full((1, 1, 1, 1), v) for v in three], 1) for three in values
    )
    return mean, std
