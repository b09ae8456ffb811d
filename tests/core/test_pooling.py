"""Test pooling of output tokens: ``--pool cls|mean|cls+mean``."""

import pytest
import torch

from fczoo import FczooError, Settings, load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.vit_config import ViTConfig
from helpers_backbone import timm_model
from helpers_families import family_backbone, family_images, timm_family

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = {"cls": "token", "mean": "avg"}


def with_pool(backbone: Backbone, pool: str) -> Backbone:
    config = backbone.config.with_pool(pool)
    weights = {k: v for k, v in backbone.weights.items() if k in config.shapes()}
    return Backbone(config, weights)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_small_patch16_dinov3",
        "vit_base_patch16_siglip_224",
        "eva02_tiny_patch14_224",
    ],
)
@pytest.mark.parametrize("pool", ["cls", "mean", "cls+mean"])
def test_pooling_matches_timm(name, pool):
    """Pool as timm does after ``reset_classifier``; cls+mean concatenates both."""
    torch.set_num_threads(1)
    model = timm_family(name)
    backbone = family_backbone(model)
    if not backbone.config.class_token and "cls" in pool:
        with pytest.raises(FczooError, match="has no class token for pool"):
            backbone.config.with_pool(pool)
        return
    images, features = family_images(backbone), []
    for part in pool.split("+"):
        model.reset_classifier(0, NAMES[part])
        with torch.no_grad():
            features.append(model(images))
    pooled = with_pool(backbone, pool)
    assert pooled.dim == len(features) * backbone.config.dim
    torch.testing.assert_close(pooled(images), torch.cat(features, 1), **CLOSE)


def test_pool_argument_selects_patches_and_prompts(backbone, noise):
    mean = with_pool(backbone, "mean")
    images, tokens = noise(2, 3, 16, 16), noise(3, 32)
    _, taps = backbone.features_and_taps(images, ["blocks.5"], {"tokens": tokens})
    rows = timm_model(backbone).norm(taps["blocks.5"]).detach()
    close = {"rtol": 1e-9, "atol": 1e-9}
    plugs = {"tokens": tokens}
    torch.testing.assert_close(mean(images, plugs), rows[:, 4:].mean(1), **close)
    torch.testing.assert_close(mean(images, plugs, "prompt"), rows[:, :3].mean(1), **close)
    both = torch.cat([rows[:, :3], rows[:, 4:]], 1).mean(1)
    torch.testing.assert_close(mean(images, plugs, "cls+prompt"), both, **close)
    with pytest.raises(FczooError, match=r"prompts cannot be pooled with pool cls\+mean"):
        with_pool(backbone, "cls+mean")(images, plugs, "prompt")


def test_plug_of_wrong_width_is_rejected(backbone, noise):
    with pytest.raises(FczooError, match="plug 'tokens' has width 64, but vit_test needs 32"):
        backbone(noise(1, 3, 16, 16), {"tokens": noise(2, 64)})


def test_mean_pooling_drops_attention_pool_weights():
    backbone = family_backbone(timm_family("vit_base_patch16_siglip_224"))
    assert any(name.startswith("attn_pool.") for name in backbone.weights)
    assert not any(name.startswith("attn_pool.") for name in with_pool(backbone, "mean").weights)


def test_default_pool_is_not_recorded():
    assert "pool" not in Settings().portable()
    assert Settings(pool="mean").portable()["pool"] == "mean"
    config = ViTConfig("v", 16, 8, dim=32, depth=1, heads=4, mlp_dim=64)
    names = [
        "name",
        "image_size",
        "patch_size",
        "dim",
        "depth",
        "heads",
        "mlp_dim",
        "eps",
        "mean",
        "std",
    ]
    assert list(config.record()) == names
    assert config.with_pool("mean").record()["pool"] == "mean"


@pytest.mark.parametrize("pool", ["max", "attention", ""])
def test_unknown_pools_are_rejected(pool):
    with pytest.raises(FczooError, match="it must be one of cls, mean, cls\\+mean"):
        load_backbone("vit_nano_32", pool=pool)


def test_attention_pool_of_backbone_is_accepted():
    config = family_backbone(timm_family("vit_base_patch16_siglip_224")).config
    assert config.pool == "attention" and config.with_pool("attention") == config


def test_bundled_backbone_supports_each_pool():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    cls, mean, both = (
        load_backbone("vit_nano_32", pool=pool)(images) for pool in ("cls", "mean", "cls+mean")
    )
    assert torch.equal(load_backbone("vit_nano_32")(images), cls)
    torch.testing.assert_close(torch.cat([cls, mean], 1), both, **CLOSE)
