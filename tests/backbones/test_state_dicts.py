"""Test checkpoints of training scripts: the loaded tensors and the note about dropped ones."""

import argparse
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fczoo import FczooError, load_backbone
from helpers_backbone import refusal_of


@pytest.fixture
def state(folder):
    """Return a random ViT in timm's names, with a classification head."""
    return load_file(folder / "small.safetensors")


def under(prefix, state):
    return {f"{prefix}{key}": value for key, value in state.items()}


def add_one(state):
    return {key: value + 1 for key, value in state.items()}


CHECKPOINTS = {
    "numbers next to": (
        lambda s: {**s, "epoch": 3, "best": None},
        "at the top level); dropped head.*, epoch, best",
    ),
    "net": (lambda s: {"net": s, "acc": 0.5}, "under net); dropped acc, head.*"),
    "lightning": (lambda s: {"state_dict": under("model.", s)}, "under state_dict, prefix model."),
    "repeated": (
        lambda s: {"model": under("module.backbone.", s)},
        "under model, prefix module.backbone.",
    ),
    "numpy": (
        lambda s: {"model": s, "best": np.float64(0.5)},
        "under model); dropped best, head.*",
    ),
    "arguments": (
        lambda s: {"model": s, "args": argparse.Namespace(lr=1)},
        "under model); dropped args",
    ),
    "dino": (
        lambda s: {
            "student": under("module.backbone.", add_one(s)),
            "teacher": under("backbone.", s),
        },
        "under teacher, prefix backbone.); dropped student",
    ),
    "ema": (lambda s: {"model": add_one(s), "model_ema": s}, "under model_ema); dropped model"),
    "moco": (
        lambda s: under("base_encoder.", s) | under("momentum_encoder.", add_one(s)),
        "prefix base_encoder.); dropped",
    ),
    "deep": (lambda s: {"a": {"b": {"encoder": s}}}, "under a.b.encoder"),
    "mae": (
        lambda s: {"model": s | {"mask_token": torch.zeros(1), "decoder_x.w": torch.zeros(1)}},
        "decoder_x.*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_backbone_is_located_and_reported(name, state, tmp_path, caplog):
    build, note = CHECKPOINTS[name]
    torch.save(build(state), tmp_path / "run.pth")
    with caplog.at_level(logging.WARNING):
        weights = load_backbone(str(tmp_path / "run.pth")).weights
    assert weights.keys() == {k for k in state if not k.startswith("head.")}
    assert all(torch.equal(v, state[k]) for k, v in weights.items())
    assert any("run.pth: loaded 18 tensors" in m and note in m for m in caplog.messages)


def test_plain_state_dict_gives_no_note(state, tmp_path, caplog):
    assert "head.weight" in state
    torch.save(state, tmp_path / "run.pth")
    load_backbone(str(tmp_path / "run.pth"))
    assert not any("took" in m for m in caplog.messages)


def test_named_architecture_loads_same_tensors(tmp_path):
    backbone = load_backbone("vit_nano_32")
    torch.save({"state_dict": under("model.", backbone.weights)}, tmp_path / "lightning.pth")
    copy = load_backbone(f"vit_nano_32:{tmp_path / 'lightning.pth'}")
    assert all(torch.equal(v, backbone.weights[k]) for k, v in copy.weights.items())


def test_ambiguous_backbones_are_rejected(state, tmp_path):
    torch.save({"net": state, "model": add_one(state)}, tmp_path / "two.pth")
    assert "holds several backbones: under net and under model" in refusal_of(tmp_path / "two.pth")


@pytest.mark.parametrize(
    "content", [[1, 2], None, "text", {}, {"model": {}}, {"model": None}, {"a": {"b": [1]}}, 5]
)
@pytest.mark.parametrize("name", ["", "vit_nano_32:"])
def test_other_content_is_rejected(content, name, tmp_path):
    torch.save(content, tmp_path / "odd.pth")
    assert "odd.pth has no plain ViT" in (text := refusal_of(f"{name}{tmp_path / 'odd.pth'}"))
    assert "complete" not in text


def test_pickled_model_is_rejected_with_advice(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    text = refusal_of(tmp_path / "model.pth")
    assert "torch.nn.modules.linear.Linear" in text
    assert "save only its state dict" in text


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_archive_is_rejected_with_advice(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "script.pt")
    assert "script.pt is a TorchScript archive; save only its state dict" in refusal_of(
        tmp_path / "script.pt"
    )


@pytest.mark.parametrize("name", ["page.pth", "page.safetensors", "page.ckpt"])
def test_other_formats_give_no_torch_advice(name, tmp_path):
    (tmp_path / name).write_text("<!DOCTYPE html><html>")
    text = refusal_of(tmp_path / name)
    assert "it is damaged or of another format; get it again" in text
    assert "PyTorch 2.6" not in text


@pytest.mark.parametrize(
    "name", ["run.pt", "run.ckpt", "run.pth.tar", "run.safetensors", "run.bin"]
)
def test_format_follows_from_content(name, state, tmp_path, monkeypatch):
    """Detect the format from the content; a name without a folder is a file as well."""
    monkeypatch.chdir(tmp_path)
    for write in (torch.save, save_file):
        write(state, name)
        assert torch.equal(load_backbone(name).weights["norm.weight"], state["norm.weight"])


def test_unreadable_file_is_reported(state, tmp_path, monkeypatch):
    save_file(state, tmp_path / "mine.safetensors")

    def refuse_open(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "open", refuse_open)
    text = refusal_of(tmp_path / "mine.safetensors")
    assert text.endswith("mine.safetensors: Permission denied")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_non_floating_dtypes_are_rejected(dtype, state, tmp_path):
    save_file({k: v.to(dtype) for k, v in state.items()}, tmp_path / "odd.safetensors")
    kind = str(dtype).removeprefix("torch.")
    assert f"is {kind}; give weights in fp16, bf16, fp32 or fp64" in refusal_of(
        tmp_path / "odd.safetensors"
    )


def test_complex_numbers_are_rejected(state, tmp_path):
    torch.save({k: v.to(torch.complex64) for k, v in state.items()}, tmp_path / "odd.pth")
    assert "is complex64; give weights in fp16" in refusal_of(tmp_path / "odd.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_dtypes_load_as_float32(dtype, state, tmp_path):
    save_file({k: v.to(dtype) for k, v in state.items()}, tmp_path / "w.safetensors")
    assert load_backbone(str(tmp_path / "w.safetensors")).dtype == torch.float32


def test_distilled_deit_is_rejected(state, tmp_path):
    torch.save({"model": {**state, "dist_token": torch.zeros(1, 1, 192)}}, tmp_path / "d.pth")
    assert "distilled DeiT (dist_token), which is not a plain ViT" in refusal_of(tmp_path / "d.pth")


@pytest.mark.parametrize(
    "name",
    [
        "dino_deitsmall16_pretrain.pth",
        "dino_vitbase16_pretrain.pth",
        "deit_tiny_patch16_224-a1311bcf.pth",
        "mae_pretrain_vit_base.pth",
    ],
)
@pytest.mark.parametrize("key", ["model", None])
def test_official_file_names_set_statistics(name, key, state, tmp_path, caplog):
    torch.save({key: state} if key else state, tmp_path / name)
    config = load_backbone(str(tmp_path / name)).config
    assert config.mean == (0.485, 0.456, 0.406)
    assert config.std == (0.229, 0.224, 0.225)
    assert not any("0.5" in message for message in caplog.messages)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device_is_used(device):
    assert load_backbone("vit_nano_32", device=device).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 1.5])
def test_unavailable_device_is_rejected(device):
    with pytest.raises(FczooError, match="cannot be used"):
        load_backbone("vit_nano_32", device=device)
