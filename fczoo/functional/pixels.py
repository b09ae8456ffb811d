"""Images before and after normalisation."""

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.types import Batch


def raw_images(backbone: Backbone, batch: Batch) -> Batch:
    """The batch with pixels in [0, 1], without normalisation, as released code takes its statistics."""
    mean, std = _channels(backbone, batch.x)
    return batch._replace(x=batch.x * std + mean)


def normalised(backbone: Backbone, images: Tensor) -> Tensor:
    """Images [B, 3, H, W] with pixels in [0, 1], normalised for the backbone."""
    mean, std = _channels(backbone, images)
    return (images - mean) / std


def _channels(backbone: Backbone, images: Tensor) -> tuple[Tensor, Tensor]:
    """The backbone's input mean and standard deviation, [1, 3, 1, 1] each."""
    values = (backbone.config.mean, backbone.config.std)
    # filled where the images are: a copy from the host would make it wait for the device
    mean, std = (torch.cat([images.new_full((1, 1, 1, 1), v) for v in three], 1) for three in values)
    return mean, std
