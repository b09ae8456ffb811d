"""Test ``fczoo show backbone`` and ``fczoo list backbones``."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from fczoo import load_backbone
from fczoo.backbones.load import backbone_facts
from fczoo.backbones.names import UNSUPPORTED, backbone_names
from fczoo.cli.app import main
from helpers_cli import TINY
from helpers_papers import output_of


def test_page_shows_size_input_licence_and_data():
    page = " ".join(output_of("show", "backbone", "vit_small_patch14_reg4_dinov2").split())
    for words in (
        "22.1 million, without a head",
        "1374: 37 x 37 patches of 14 pixels, 1 class token, 4 registers",
        "384 numbers: the class token",
        "LayerScale",
        "518 x 518 pixels; mean 0.485, 0.456, 0.406; std 0.229, 0.224, 0.225",
        "apache-2.0, as timm states it",
        "pre-training LVD-142M",
    ):
        assert words in page


def test_hub_name_shows_same_page():
    name = "vit_base_patch16_clip_quickgelu_224.openai"
    page = output_of("show", "backbone", "openai/clip-vit-base-patch16")
    assert page == output_of("show", name)
    assert "QuickGELU, norm before the blocks" in page and "use quickgelu model" not in page
    assert "use quickgelu model" in output_of(
        "show", "backbone", "vit_base_patch16_clip_224.openai"
    )
    assert "the checkpoint's projector to 512 dimensions" in page


def test_page_shows_dropped_head():
    page = output_of("show", "backbone", "vit_base_patch16_224_miil.in21k")
    assert "the checkpoint's classification head of 11,221 classes" in page
    assert "no bias of queries, keys and values" in page


def test_weight_file_has_page(tmp_path):
    save_file(load_backbone("vit_nano_32").weights, tmp_path / "mine.safetensors")
    page = output_of("show", "backbone", str(tmp_path / "mine.safetensors"))
    assert "65: 8 x 8 patches of 4 pixels, 1 class token" in page


def test_dropped_head_of_file_is_reported(tmp_path):
    head = {"head.weight": torch.zeros(1000, 128), "head.bias": torch.zeros(1000)}
    file = tmp_path / "mine.safetensors"
    save_file({**load_backbone("vit_nano_32").weights, **head}, file)
    assert "head.* (a classification head of 1,000 classes)" in output_of(
        "show", "backbone", f"vit_nano_32:{file}"
    )
    words = ["--methods", "fedncm", "--backbone", f"vit_nano_32:{file}", *TINY]
    outcome = CliRunner().invoke(main, ["bench", *words, "--out", str(tmp_path / "runs")])
    note = "mine.safetensors: dropped head.* (a classification head of 1,000 classes)"
    assert note in outcome.stderr and "warning" not in outcome.stdout.partition("method ")[0]
    assert note in (tmp_path / "runs" / "log.txt").read_text("utf-8")


def test_flops_count_two_operations_per_multiply_add():
    """Count ViT-Ti/16 by hand: every block, the last one only where the class token needs it."""
    facts = backbone_facts("vit_tiny_patch16_224.augreg_in21k")
    n, d, m = 197, 192, 768
    block = n * (3 * d * d + d * d + 2 * d * m) + 2 * n * n * d
    last = n * 3 * d * d + d * d + 2 * d * m + 2 * n * d
    assert facts.flops == 2 * (196 * 16 * 16 * 3 * d + 11 * block + last)
    assert facts.parameters == 5_524_416


@pytest.mark.parametrize(
    "name", ["resnet18", "swin_tiny_patch4_window7_224", "microsoft/resnet-50", "vit_bse_patch16"]
)
def test_unsupported_backbone_is_rejected_with_one_line(name):
    text = output_of("show", "backbone", name, code=1)
    assert text.count("\n") == 1 and "vit_base_patch16" in text


def test_list_includes_unsupported_families():
    text = output_of("list", "backbones")
    listed = [line.split()[0] for line in text.split("\n\n")[0].splitlines()]
    assert listed == backbone_names()
    assert UNSUPPORTED in text
    assert "LVD-142M" in text


def test_partial_name_suggests_full_names():
    text = output_of("show", "backbone", "dinov2", code=1)
    assert "did you mean vit_base_patch14_dinov2, " in text and text.count("\n") == 1
    text = output_of("show", "dinov2", code=1)
    assert "fczoo show backbone vit_base_patch14_dinov2, or vit_" in text


def test_small_network_and_missing_file_have_page(tmp_path):
    page = output_of("show", "backbone", "vit_nano_32")
    assert "0.146 GFLOPs per image (0.073 billion multiply-adds)" in page
    page = output_of("show", "backbone", "vit_nano_32:nowhere.safetensors")
    assert "the weight file nowhere.safetensors does not exist\n" in page
