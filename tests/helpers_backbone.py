"""The forward pass of timm, to compare with."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fczoo.core.backbone import Backbone


def by_timm(backbone: Backbone, images: Tensor) -> Tensor:
    c = backbone.config
    model = VisionTransformer(
        c.image_size,
        c.patch_size,
        embed_dim=c.dim,
        depth=c.depth,
        num_heads=c.heads,
        mlp_ratio=c.mlp_dim / c.dim,
        num_classes=0,
    )
    model.to(backbone.dtype).load_state_dict(backbone.weights)
    with torch.no_grad():
        return model.eval()(images)
