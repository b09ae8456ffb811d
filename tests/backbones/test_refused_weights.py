"""Refusals of a backbone's weights, and their messages."""

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

# --- what is refused, in one line


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
def test_missing_files(tmp_path, spec):
    assert "no weight file at" in refusal_of(spec.format(tmp_path))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("part", [0, 7, 0.5, 0.999])
def test_truncated_files(folder, tmp_path, suffix, part):
    content = (folder / f"small.{suffix}").read_bytes()
    (tmp_path / f"cut.{suffix}").write_bytes(
        content[: part if part > 1 else int(part * len(content))]
    )
    assert f"cut.{suffix}" in refusal_of(tmp_path / f"cut.{suffix}")


@pytest.mark.parametrize(
    "name", ["text.safetensors", "text.pth", "vit_tiny_patch16_224.npz", "text.bin"]
)
def test_files_that_hold_no_weights(tmp_path, name):
    (tmp_path / name).write_text("this is not a weight file\n" * 50)
    assert name in refusal_of(tmp_path / name)


@pytest.mark.parametrize(
    "content", [torch.zeros(3), [1, 2], 5, {}, {1: torch.zeros(2)}, {"cls_token": 3}]
)
def test_pth_files_that_hold_no_state_dict_of_a_vit(tmp_path, content):
    torch.save(content, tmp_path / "odd.pth")
    assert "odd.pth" in refusal_of(tmp_path / "odd.pth")


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.zeros(2)},
        {"cls_token": torch.zeros(())},
        {
            "cls_token": torch.zeros(1, 1, 192),
            "patch_embed.proj.weight": torch.zeros(192, 3, 8, 8),
            "pos_embed": torch.zeros(1, 5, 192),
        },
        {
            "cls_token": torch.zeros(1, 1, 192),
            "patch_embed.proj.weight": torch.zeros(192, 3, 0, 0),
            "pos_embed": torch.zeros(1, 5, 192),
        },
    ],
)
def test_files_that_hold_something_else(tmp_path, content):
    save_file(content, tmp_path / "other.safetensors")
    assert "does not hold a plain ViT" in refusal_of(tmp_path / "other.safetensors")


def test_a_block_number_too_high_does_not_count(folder, tmp_path):
    weights = load_file(folder / "small.safetensors")
    save_file(
        {**weights, "blocks.99999999.norm1.weight": torch.zeros(192)}, tmp_path / "high.safetensors"
    )
    assert "weights do not fit" in refusal_of(tmp_path / "high.safetensors")


def test_heads_that_cannot_be_told(backbone, tmp_path):
    save_file(backbone.weights, tmp_path / "narrow.safetensors")
    assert "the number of heads cannot be derived" in refusal_of(tmp_path / "narrow.safetensors")


def test_a_tensor_too_many_or_too_few(folder, tmp_path):
    weights = load_file(folder / "small.safetensors")
    save_file({**weights, "reg_token": torch.zeros(1, 4, 192)}, tmp_path / "more.safetensors")
    assert "reg_token" in refusal_of(tmp_path / "more.safetensors")
    weights.pop("norm.bias")
    save_file(weights, tmp_path / "less.safetensors")
    assert "norm.bias is missing" in refusal_of(tmp_path / "less.safetensors")


def test_positions_of_another_image_size_get_the_size_as_advice(tmp_path):
    weights = {**load_backbone("vit_nano_32").weights, "pos_embed": torch.zeros(1, 1 + 5 * 5, 128)}
    save_file(weights, tmp_path / "mine.safetensors")
    assert "give image_size 20, which these positions are of" in refusal_of(
        f"vit_nano_32:{tmp_path / 'mine.safetensors'}"
    )
    load_backbone(f"vit_nano_32:{tmp_path / 'mine.safetensors'}", image_size=20)


def test_a_file_of_another_architecture_than_named(folder):
    assert "weights do not fit vit_tiny_patch16_224" in refusal_of(
        f"vit_tiny_patch16_224:{folder / 'small.safetensors'}"
    )
    assert "weights do not fit vit_nano_32" in refusal_of(
        f"vit_nano_32:{folder / 'small.safetensors'}"
    )


def test_unknown_names_bring_the_nearest(folder):
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
def test_models_that_are_no_plain_vit(folder, name, reason):

    text = refusal_of(f"{name}:{folder / 'mine.safetensors'}")
    assert f"{name} is not a plain ViT" in text and re.search(reason, text)
    assert UNSUPPORTED in text
    assert EXAMPLES in text
    assert "\n" not in text


def test_the_suggested_names_load():
    """Suggest only names of the list, in every error."""
    for name in re.findall(r"\b\w+_patch\w+", EXAMPLES):
        assert name in spellings()
        assert architecture(name).name == name
    for word in ("swin_tinny_patch4", "resnet50x", "vit_base_patch16_xp_24", "facebook/dinov9"):
        suggested = re.findall(r"\b\w+_patch\w+", refusal_of(word))
        assert set(suggested) - {word} <= set(spellings())


def test_weights_that_the_hub_does_not_give(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host\nwith a second line")

    monkeypatch.setattr("timm.create_model", offline)
    text = refusal_of("vit_tiny_patch16_224")
    assert "cannot get the weights of vit_tiny_patch16_224: no route to host" in text
    assert "FILE" in text


def test_a_hub_that_is_not_there_is_asked_once(monkeypatch):
    """Ask an unreachable hub only once; end the message in a whole word.

    The hub's client would try for a minute.
    """

    def nowhere(*args, **kwargs):
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
    monkeypatch.setattr("socket.create_connection", nowhere)
    monkeypatch.setattr("timm.create_model", from_cache)
    offline_flag = constants.HF_HUB_OFFLINE
    assert "the cache has no such file and so on" in (text := refusal_of("vit_tiny_patch16_224"))
    assert re.search(r"(and|so|on) \.\.\.; without network give a file", text)
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
    assert mark.exists()  # it would have


def test_a_header_that_lies_about_its_length(tmp_path):
    (tmp_path / "lie.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "lie.safetensors" in refusal_of(tmp_path / "lie.safetensors")


def test_a_flax_file_of_another_name_is_refused_with_advice(tmp_path: Path) -> None:
    np.savez(tmp_path / "Ti_16.npz", cls=np.zeros((1, 1, 4)))
    with pytest.raises(FczooError, match=r"not a timm model's.*give backbone NAME:Ti_16\.npz"):
        load_backbone(str(tmp_path / "Ti_16.npz"))


def test_what_is_no_plain_vit_is_refused_before_anything_is_fetched(
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
