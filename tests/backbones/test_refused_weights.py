"""Test rejected weights of backbones and their messages."""

import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from fczoo import FczooError, load_backbone
from fczoo.backbones.names import EXAMPLES, UNSUPPORTED, spellings
from fczoo.backbones.timm_vit import architecture
from helpers_backbone import refusal_of

# --- one-line errors


@pytest.mark.parametrize(
    "spec",
    [
        "{}/none.safetensors",
        "vit_tiny_patch16_224:{}/none.safetensors",
        "{}/none.pth",
        "{}/none",
        "{}",
    ],
)
def test_missing_file_is_rejected(tmp_path, spec):
    assert "no weight file at" in refusal_of(spec.format(tmp_path))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("part", [0, 7, 0.5, 0.999])
def test_truncated_file_is_rejected(folder, tmp_path, suffix, part):
    content = (folder / f"small.{suffix}").read_bytes()
    (tmp_path / f"cut.{suffix}").write_bytes(
        content[: part if part > 1 else int(part * len(content))]
    )
    assert f"cut.{suffix}" in refusal_of(tmp_path / f"cut.{suffix}")


@pytest.mark.parametrize(
    "name", ["text.safetensors", "text.pth", "vit_tiny_patch16_224.npz", "text.bin"]
)
def test_text_file_is_rejected(tmp_path, name):
    (tmp_path / name).write_text("this is not a weight file\n" * 50)
    assert name in refusal_of(tmp_path / name)


@pytest.mark.parametrize(
    "content", [torch.zeros(3), [1, 2], 5, {}, {1: torch.zeros(2)}, {"cls_token": 3}]
)
def test_pth_file_without_vit_state_dict_is_rejected(tmp_path, content):
    torch.save(content, tmp_path / "odd.pth")
    assert "odd.pth" in refusal_of(tmp_path / "odd.pth")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": torch.zeros(2)}, "has no plain ViT"),
        ({"cls_token": torch.zeros(())}, "has no plain ViT"),
        (
            {
                "cls_token": torch.zeros(1, 1, 192),
                "patch_embed.proj.weight": torch.zeros(192, 3, 8, 8),
                "pos_embed": torch.zeros(1, 5, 192),
            },
            "the architecture cannot be derived",
        ),
        (
            {
                "cls_token": torch.zeros(1, 1, 192),
                "patch_embed.proj.weight": torch.zeros(192, 3, 0, 0),
                "pos_embed": torch.zeros(1, 5, 192),
            },
            "the architecture cannot be derived",
        ),
    ],
)
def test_safetensors_file_without_vit_is_rejected(tmp_path, content, problem):
    save_file(content, tmp_path / "other.safetensors")
    assert problem in refusal_of(tmp_path / "other.safetensors")


def test_too_high_block_number_is_rejected(folder, tmp_path):
    weights = load_file(folder / "small.safetensors")
    save_file(
        {**weights, "blocks.99999999.norm1.weight": torch.zeros(192)}, tmp_path / "high.safetensors"
    )
    assert "weights do not fit" in refusal_of(tmp_path / "high.safetensors")


def test_unknown_head_count_is_rejected(backbone, tmp_path):
    save_file(backbone.weights, tmp_path / "narrow.safetensors")
    assert "the number of heads cannot be derived" in refusal_of(tmp_path / "narrow.safetensors")


def test_extra_or_missing_tensor_is_rejected(folder, tmp_path):
    weights = load_file(folder / "small.safetensors")
    save_file({**weights, "reg_token": torch.zeros(1, 4, 192)}, tmp_path / "more.safetensors")
    assert "reg_token" in refusal_of(tmp_path / "more.safetensors")
    weights.pop("norm.bias")
    save_file(weights, tmp_path / "less.safetensors")
    assert "norm.bias is missing" in refusal_of(tmp_path / "less.safetensors")


def test_position_embedding_of_other_size_suggests_image_size(tmp_path):
    weights = {**load_backbone("vit_nano_32").weights, "pos_embed": torch.zeros(1, 1 + 5 * 5, 128)}
    save_file(weights, tmp_path / "mine.safetensors")
    assert "give image_size 20, the size of these weights" in refusal_of(
        f"vit_nano_32:{tmp_path / 'mine.safetensors'}"
    )
    load_backbone(f"vit_nano_32:{tmp_path / 'mine.safetensors'}", image_size=20)


def test_file_of_other_architecture_is_rejected(folder):
    assert "weights do not fit vit_tiny_patch16_224" in refusal_of(
        f"vit_tiny_patch16_224:{folder / 'small.safetensors'}"
    )
    assert "weights do not fit vit_nano_32" in refusal_of(
        f"vit_nano_32:{folder / 'small.safetensors'}"
    )


def test_unknown_name_suggests_nearest_name(folder):
    assert "did you mean" in refusal_of("vit_tinny_patch16_224")
    assert "vit_tiny_patch16_224" in refusal_of("vit_tinny_patch16_224")
    assert "vit_nano_32" in refusal_of("vit_nanno_32")
    assert "vit_tiny_patch16_224" in refusal_of(
        f"vit_tinny_patch16_224:{folder / 'mine.safetensors'}"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet18", "it is a ResNet"),
        ("deit_tiny_distilled_patch16_224", "it is a VisionTransformerDistilled"),
        ("swin_tiny_patch4_window7_224", "it is a SwinTransformer"),
        ("beit_base_patch16_224", "it is a Beit"),
        ("vit_tiny_r_s16_p8_224", "its patch embedding is a HybridEmbed"),
        ("vit_base_patch16_xp_224", "its blocks are ParallelScalingBlocks"),
        ("vit_base_patch16_rope_224", "its attention is AttentionRope"),
        ("aimv2_large_patch14_224", "its norms are not layer norms"),
    ],
)
def test_unsupported_architecture_is_rejected(folder, name, reason):

    text = refusal_of(f"{name}:{folder / 'mine.safetensors'}")
    assert f"{name} is not a plain ViT" in text and re.search(reason, text)
    assert UNSUPPORTED in text
    assert EXAMPLES in text
    assert "\n" not in text


def test_suggested_names_are_valid():
    """Suggest only known names in every error."""
    for name in re.findall(r"\b\w+_patch\w+", EXAMPLES):
        assert name in spellings()
        assert architecture(name).name == name
    for word in ("swin_tinny_patch4", "resnet50x", "vit_base_patch16_xp_24", "facebook/dinov9"):
        suggested = re.findall(r"\b\w+_patch\w+", refusal_of(word))
        assert set(suggested) - {word} <= set(spellings())


def test_failed_download_is_reported(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host\nwith a second line")

    monkeypatch.setattr("timm.create_model", offline)
    text = refusal_of("vit_tiny_patch16_224")
    assert "cannot get the weights of vit_tiny_patch16_224: no route to host" in text
    assert "FILE" in text


def test_unreachable_hub_is_tried_once(monkeypatch):
    """Contact an unreachable hub only once and end the message with a whole word.

    The client of the hub would retry for a minute.
    """

    def refuse_connection(*args, **kwargs):
        raise OSError("no route to host")

    def from_cache(*args, pretrained, **kwargs):
        if not pretrained:
            return create_model(*args, pretrained=False, **kwargs)
        assert constants.HF_HUB_OFFLINE
        raise OSError("the cache has no such file " + "and so on " * 40)

    create_model = timm.create_model
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("socket.create_connection", refuse_connection)
    monkeypatch.setattr("timm.create_model", from_cache)
    offline_flag = constants.HF_HUB_OFFLINE
    assert "the cache has no such file and so on" in (text := refusal_of("vit_tiny_patch16_224"))
    assert re.search(r"(and|so|on) \.\.\.; without a network, give a file", text)
    assert offline_flag == constants.HF_HUB_OFFLINE


class Harmful:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_pickles_are_not_executed(tmp_path, folder):
    mark = tmp_path / "mark"
    torch.save({"cls_token": Harmful(mark)}, tmp_path / "zip.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Harmful(mark), protocol=2))
    np.savez(
        tmp_path / "vit_tiny_patch16_224.npz",
        allow_pickle=True,
        embedding=np.array([Harmful(mark)], dtype=object),
    )
    for file in ("zip.pth", "raw.pth", "vit_tiny_patch16_224.npz"):
        assert file in refusal_of(tmp_path / file)
        assert not mark.exists(), file
    pickle.loads(pickle.dumps(Harmful(mark)))
    assert mark.exists()  # a direct pickle.loads executes the payload


def test_wrong_header_length_is_rejected(tmp_path):
    (tmp_path / "lie.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "lie.safetensors" in refusal_of(tmp_path / "lie.safetensors")


def test_flax_file_with_unknown_name_is_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "Ti_16.npz", cls=np.zeros((1, 1, 4)))
    with pytest.raises(
        FczooError, match=r"not that of a timm model.*give backbone NAME:Ti_16\.npz"
    ):
        load_backbone(str(tmp_path / "Ti_16.npz"))


def test_unsupported_architecture_is_rejected_before_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("timm.models._builder.load_pretrained", fetch)
    with pytest.raises(
        FczooError,
        match=r"swin_tiny_patch4_window7_224 is not a plain ViT: it is a SwinTransformer",
    ):
        load_backbone("swin_tiny_patch4_window7_224")
    with pytest.raises(FczooError, match="asked the hub"):
        load_backbone("vit_tiny_patch16_224")
