"""Provide weight files for the tests of backbones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write one random ViT of timm's tiny width in several files.

    ``small`` has one block and 16-pixel images.
    """
    root = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    small = VisionTransformer(
        16, 8, embed_dim=192, depth=1, num_heads=3, num_classes=5
    ).state_dict()
    save_file(small, root / "small.safetensors")
    torch.save(small, root / "small.pth")
    tiny = VisionTransformer(
        224, 16, embed_dim=192, depth=12, num_heads=3, num_classes=0
    ).state_dict()
    save_file(tiny, root / "mine.safetensors")
    save_file(tiny, root / "deit_tiny_patch16_224.fb_in1k.safetensors")
    return root
