"""Images before and after normalisation."""

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.types import Batch


def raw_images(backbone: Backbone, batch: Batch) -> Batch:
    """The batch with pixels in [0, 1], as released code feeds them to its statistics: without normalisation."""
    mean, std = _channels(backbone, batch.x)
    return batch._replace(x=batch.x * std + mean)


def normalised(backbone: Backbone, images: Tensor) -> Tensor:
    """Pixels in [0, 1] as the backbone wants them."""
    mean, std = _channels(backbone, images)
    return (images - mean) / std


def _channels(backbone: Backbone, images: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(v, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
        for v in (backbone.config.mean, backbone.config.std)
    )
    return mean, std
