"""Test names of backbones: hub spellings and the list of known names."""

import re
import warnings

import pytest
import timm
import torch

from fczoo import FczooError, Settings
from fczoo.backbones.names import (
    _HUB_PATTERNS,
    BUNDLED_NAME,
    UNSUPPORTED,
    backbone_names,
    canonical_backbone,
)
from fczoo.backbones.pretraining_overlap import describe_pretraining, pretraining_sets
from fczoo.backbones.timm_vit import vit_config


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("timm/vit_base_patch16_224.dino", "vit_base_patch16_224.dino"),
        ("timm/vit_base_patch16_224", "vit_base_patch16_224"),
        ("hf-hub:timm/vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_dinov2.lvd142m"),
        ("hf_hub:timm/vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_dinov2.lvd142m"),
        ("https://huggingface.co/timm/vit_base_patch16_224.mae", "vit_base_patch16_224.mae"),
        ("facebook/dinov2-small", "vit_small_patch14_dinov2.lvd142m"),
        ("hf-hub:facebook/dinov2-base", "vit_base_patch14_dinov2.lvd142m"),
        ("facebook/dinov2-with-registers-large", "vit_large_patch14_reg4_dinov2.lvd142m"),
        ("facebook/dinov3-vits16-pretrain-lvd1689m", "vit_small_patch16_dinov3.lvd1689m"),
        ("facebook/dino-vitb16", "vit_base_patch16_224.dino"),
        ("google/vit-base-patch16-224-in21k", "vit_base_patch16_224.orig_in21k"),
        ("google/vit-base-patch16-224", "vit_base_patch16_224.orig_in21k_ft_in1k"),
        ("facebook/dinov3-vits16plus-pretrain-lvd1689m", "vit_small_plus_patch16_dinov3.lvd1689m"),
        ("google/siglip-base-patch16-224", "vit_base_patch16_siglip_224.webli"),
        ("google/siglip-so400m-patch14-384", "vit_so400m_patch14_siglip_384.webli"),
        ("google/siglip2-base-patch16-224", "vit_base_patch16_siglip_224.v2_webli"),
        ("google/siglip2-so400m-patch14-384", "vit_so400m_patch14_siglip_378.v2_webli"),
        ("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "vit_base_patch16_clip_224.laion2b"),
        ("laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K", "vit_large_patch14_clip_224.datacompxl"),
        ("openai/clip-vit-base-patch32", "vit_base_patch32_clip_quickgelu_224.openai"),
        ("openai/clip-vit-large-patch14-336", "vit_large_patch14_clip_quickgelu_336.openai"),
        ("VIT-Base_patch16_224.DINO", "vit_base_patch16_224.dino"),
    ],
)
def test_hub_spellings_map_to_timm_names(spelling, name):
    assert canonical_backbone(spelling) == name
    assert Settings(backbone=spelling).backbone == name


def test_hub_patterns_give_listed_names():
    known_names = set(backbone_names())
    for pattern, name in _HUB_PATTERNS:
        spelling = pattern.replace("(\\d+)", "256").replace("\\d", "1")
        spelling = re.sub(r"\[(.)[^]]*\]", r"\1", spelling)  # the first of several letters
        spelling = re.sub(r"\(([^)|]*)[^)]*\)", r"\1", spelling)  # the first of several words
        assert canonical_backbone(spelling) in known_names, (pattern, name)


@pytest.mark.parametrize(
    ("spelling", "advice"),
    [
        ("facebook/dinov2-smal", "did you mean vit_small_patch14_dinov2.lvd142m, "),
        ("google/siglip2-base-patch16-naflex", "did you mean vit_base_patch16_siglip_224.v2_webli"),
        ("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", "vit_large_patch14_clip_224.laion2b"),
        ("laion/CLIP-convnext_base_w-laion2B-s13B-b82K", UNSUPPORTED),
        ("microsoft/beit-base-patch16-224", UNSUPPORTED),
        ("google/vit-base-patch16-224-in22k", "did you mean vit_base_patch16_224"),
        ("facebook/dinov3", "did you mean vit_base_patch16_dinov3.lvd1689m, "),
        ("hf-hub:microsoft/swin-tiny-patch4-window7-224", UNSUPPORTED),
        ("microsoft/resnet-50", "other weights and give NAME:FILE"),
    ],
)
def test_unsupported_hub_models_are_rejected(spelling, advice):
    with pytest.raises(FczooError) as error:
        canonical_backbone(spelling)
    assert advice in str(error.value) and "\n" not in str(error.value)


def test_file_paths_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine").write_text("")
    for spec in (
        "weights/mine",
        "weights/new.pth",
        f"{tmp_path}/x",
        "./a/b",
        f"{BUNDLED_NAME}:a/b",
    ):
        assert canonical_backbone(spec) == spec


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("vit_base_patch14_dinov2.lvd142m", "LVD-142M"),
        ("vit_base_patch16_siglip_224.v2_webli", "WebLI"),
        ("vit_base_patch16_clip_224.laion2b_ft_in12k_in1k", "LAION-2B and ImageNet-21k and"),
        ("eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", "Merged-38M and ImageNet-21k and"),
        ("vit_small_patch16_36x1_224", "not known"),
    ],
)
def test_pretraining_data_follow_from_tag(name, data):
    assert describe_pretraining(name).startswith(data)


def test_most_weights_have_known_pretraining_data():
    unknown = [n for n in backbone_names() if not pretraining_sets(n) and ".pali" not in n]
    assert len(unknown) < 12


@pytest.mark.slow
def test_every_listed_architecture_has_valid_config():
    """Read the configuration of every listed architecture, with one block on no device."""
    warnings.simplefilter("ignore")
    for name in dict.fromkeys(n.partition(".")[0] for n in backbone_names()[1:]):
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=0, depth=1)
        assert vit_config(name, model).depth == 1
