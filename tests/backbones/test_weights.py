"""Test sources of backbone weights and their errors."""

import re
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fczoo import load_backbone
from fczoo.backbones import names
from fczoo.backbones.names import backbone_names
from fczoo.backbones.weights import weights_file
from helpers_backbone import by_timm, refusal_of


def test_names_are_read_from_timm_source(monkeypatch):
    """Read the names of models without importing timm.

    Import timm if its source has no such table.
    """
    known_names = backbone_names()
    assert known_names[0] == "vit_nano_32"
    assert set(known_names[1:]) <= set(timm.list_pretrained())
    assert len(known_names) > 300
    assert "vit_base_patch16_224.augreg_in21k" in known_names
    assert "vit_base_patch16_clip_quickgelu_224.openai" in known_names
    monkeypatch.setattr(names, "_TABLE_PATTERN", re.compile("no such table"))
    names._names_from_source.cache_clear()
    assert backbone_names() == known_names
    names._names_from_source.cache_clear()


def test_bundled_backbone_loads():
    backbone = load_backbone("vit_nano_32")
    c = backbone.config
    assert (c.name, c.image_size, c.patch_size, c.dim, c.depth, c.heads, c.mlp_dim) == (
        "vit_nano_32",
        32,
        4,
        128,
        6,
        4,
        512,
    )
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(backbone(images), by_timm(backbone, images), rtol=1e-5, atol=1e-5)
    assert len(backbone.sha256) == 64


def test_stored_weights_of_npz_release_load(tmp_path, monkeypatch):
    """Load stored safetensors of a model whose release is .npz; timm before 1.0.31 read them so."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert timm.models.get_pretrained_cfg(name).custom_load
    weights = timm.create_model(name, pretrained=False).state_dict()
    weights_file(name).parent.mkdir()
    save_file(weights, weights_file(name))
    backbone = load_backbone("vit_tiny_patch16_224")
    assert torch.equal(backbone.weights["cls_token"], weights["cls_token"])
    assert {key for key in weights if key not in backbone.weights} == {"head.weight", "head.bias"}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_architecture_follows_from_shapes(folder, suffix):
    backbone = load_backbone(str(folder / f"small.{suffix}"))
    c = backbone.config
    assert (c.name, c.image_size, c.patch_size, c.dim, c.depth, c.heads, c.mlp_dim) == (
        "vit_tiny_patch8_16",
        16,
        8,
        192,
        1,
        3,
        768,
    )
    assert not any(k.startswith("head") for k in backbone.weights)
    file_weights = load_file(folder / "small.safetensors")
    assert all(torch.equal(v, file_weights[k]) for k, v in backbone.weights.items())
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(backbone(images), by_timm(backbone, images), rtol=1e-5, atol=1e-5)


def test_bundled_architecture_is_recognised_in_file(tmp_path):
    backbone = load_backbone("vit_nano_32")
    save_file(backbone.weights, tmp_path / "copy.safetensors")
    copy = load_backbone(str(tmp_path / "copy.safetensors"))
    assert copy.config == backbone.config
    assert all(torch.equal(v, backbone.weights[k]) for k, v in copy.weights.items())
    assert load_backbone(f"vit_nano_32:{tmp_path / 'copy.safetensors'}").config == backbone.config


def test_name_with_file_loads(folder):
    config = load_backbone(
        f"vit_tiny_patch16_224.augreg_in21k:{folder / 'mine.safetensors'}"
    ).config
    assert (config.name, config.dim, config.depth, config.heads, config.mean) == (
        "vit_tiny_patch16_224.augreg_in21k",
        192,
        12,
        3,
        (0.5, 0.5, 0.5),
    )


def test_timm_file_name_sets_statistics(folder):
    config = load_backbone(str(folder / "deit_tiny_patch16_224.fb_in1k.safetensors")).config
    assert (config.name, config.mean, config.std) == (
        "deit_tiny_patch16_224.fb_in1k",
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    )


def test_statistics_can_be_overridden(folder):
    config = load_backbone(
        str(folder / "small.safetensors"), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0)
    ).config
    assert (config.mean, config.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    "statistics", [{"mean": (0.5,)}, {"std": (0.5, 0.5)}, {"std": (0.5, 0.0, 0.5)}]
)
def test_invalid_statistics_are_rejected(folder, statistics):
    assert "must be three numbers each" in refusal_of(folder / "small.safetensors", **statistics)


def test_other_image_size_resamples_position_embedding(folder):
    small = load_backbone(str(folder / "small.safetensors"))
    large = load_backbone(str(folder / "small.safetensors"), image_size=32)
    small_embedding, large_embedding = small.weights["pos_embed"], large.weights["pos_embed"]
    assert large.config == replace(small.config, image_size=32)
    assert large_embedding.shape == (1, 17, 192)
    assert torch.equal(large_embedding[:, 0], small_embedding[:, 0])  # the class token's
    grid = small_embedding[:, 1:].unflatten(1, (2, 2)).permute(0, 3, 1, 2)
    target = (
        F.interpolate(grid, size=(4, 4), mode="bicubic", antialias=True)
        .permute(0, 2, 3, 1)
        .flatten(1, 2)
    )
    torch.testing.assert_close(large_embedding[:, 1:], target)
    assert all(
        torch.equal(v, small.weights[k]) for k, v in large.weights.items() if k != "pos_embed"
    )
    assert large(torch.zeros(1, 3, 32, 32)).shape == (1, 192)
    same = load_backbone(str(folder / "small.safetensors"), image_size=16)
    assert torch.equal(same.weights["pos_embed"], small_embedding)


@pytest.mark.parametrize("size", [20, 0, -8])
def test_invalid_image_size_is_rejected(folder, size):
    refusal = refusal_of(folder / "small.safetensors", image_size=size)
    assert f"image size {size} is not a multiple of the patch size of " in refusal
    assert refusal.endswith("; give a multiple of 8")


def test_hash_equals_file_hash(folder):
    import hashlib

    file = folder / "small.safetensors"
    assert load_backbone(str(file)).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
