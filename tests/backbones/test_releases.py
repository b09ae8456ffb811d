"""Test weight files of ViT families: timm layouts and official releases."""

import logging

import pytest
import timm
import torch
from safetensors.torch import save_file

from fczoo import load_backbone
from fczoo.backbones.state_dict import read_state_dict
from fczoo.backbones.timm_vit import common_names
from fczoo.backbones.weights import hub_repository
from helpers_backbone import refusal_of
from helpers_families import family_backbone, family_images, timm_family


def same_weights(weights, backbone):
    return weights.keys() == backbone.weights.keys() and all(
        torch.equal(value, backbone.weights[name]) for name, value in weights.items()
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_siglip_224",
        "eva02_base_patch14_448",
        "vit_small_plus_patch16_dinov3",
        "vit_base_patch16_clip_224",
    ],
)
def test_timm_state_dict_is_read(name, tmp_path):
    model = timm_family(name)
    state = {f"visual.trunk.{key}": value for key, value in model.state_dict().items()}
    save_file(state, tmp_path / "family.safetensors")
    assert same_weights(
        common_names(read_state_dict(tmp_path / "family.safetensors")), family_backbone(model)
    )


def test_dinov2_release_with_registers_is_read(tmp_path):
    model = timm_family("vit_giant_patch14_reg4_dinov2")
    backbone, state = family_backbone(model), model.state_dict()
    shift = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(3))
    released = {
        **{
            k.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): v
            for k, v in state.items()
        },
        "cls_token": state["cls_token"] - shift,
        "pos_embed": torch.cat([shift, state["pos_embed"]], 1),
        "register_tokens": state["reg_token"],
        "mask_token": torch.zeros(1, 48),
    }
    released.pop("reg_token")
    torch.save(released, tmp_path / "dinov2_vitg14_reg4_pretrain.pth")
    weights = common_names(read_state_dict(tmp_path / "dinov2_vitg14_reg4_pretrain.pth"))
    torch.testing.assert_close(weights, backbone.weights)


def test_dinov3_release_is_read(tmp_path):
    model = timm_family("vit_small_patch16_dinov3")
    backbone, released = family_backbone(model), {}
    for name, value in model.state_dict().items():
        released[name.replace("gamma_", "ls").replace("reg_", "storage_")] = value
    released = {
        (
            f"{k}.gamma"
            if k.endswith(("ls1", "ls2"))
            else k.replace("storage_token", "storage_tokens")
        ): v
        for k, v in released.items()
    }
    for i in range(2):
        released[f"blocks.{i}.attn.qkv.bias"] = torch.zeros(144)
        released[f"blocks.{i}.attn.qkv.bias_mask"] = torch.full((144,), torch.nan)
    released |= {"mask_token": torch.zeros(1, 48), "rope_embed.periods": torch.zeros(4)}
    released["local_cls_norm.weight"] = torch.zeros(48)
    torch.save(released, tmp_path / "dinov3.pth")
    assert same_weights(common_names(read_state_dict(tmp_path / "dinov3.pth")), backbone)


def test_deit3_file_loads_at_other_size(tmp_path):
    """Load a whole DeiT3 with its head, and report the dropped head."""
    model = timm.create_model("deit3_small_patch16_224", depth=12, num_classes=1000)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    backbone = load_backbone(
        f"deit3_small_patch16_224:{tmp_path / 'mine.safetensors'}", image_size=32
    )
    assert backbone.config.layer_scale and backbone.config.position == "patches"
    assert backbone.weights["pos_embed"].shape == (1, 4, 384)
    assert backbone(family_images(backbone)).shape == (2, 384)
    model.reset_classifier(0)
    model.set_input_size((32, 32))
    images = family_images(backbone)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), model.eval()(images), rtol=1e-4, atol=1e-5)


def test_dropped_head_is_reported(tmp_path, caplog):
    state = timm_family("vit_tiny_patch16_224").state_dict()
    head = {"head.weight": torch.zeros(1000, 48), "head.bias": torch.zeros(1000)}
    save_file({**state, **head}, tmp_path / "mine.safetensors")
    with caplog.at_level(logging.INFO):
        read_state_dict(tmp_path / "mine.safetensors")
    note = "mine.safetensors: dropped head.* (a classification head of 1,000 classes)"
    assert note in caplog.messages


def test_transformers_file_is_rejected_with_advice(tmp_path):
    save_file(
        {"vit.embeddings.patch_embeddings.projection.weight": torch.zeros(8, 3, 4, 4)},
        tmp_path / "model.safetensors",
    )
    text = refusal_of(tmp_path / "model.safetensors")
    assert "names of Hugging Face transformers; use timm's weights" in text


def test_quick_gelu_variant_uses_same_weights():
    name = "vit_base_patch16_clip_quickgelu_224.openai"
    assert hub_repository(name) == "timm/vit_base_patch16_clip_224.openai"
