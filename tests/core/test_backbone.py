"""Test the ViT with plugs against timm's forward pass and against formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fczoo import FczooError
from fczoo.core.backbone import LORA_PARTS, Backbone
from fczoo.core.vit_forward import attend
from helpers_backbone import CLOSE, by_hand, by_timm


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(
        3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_backbone_without_plugs_matches_timm(backbone, images):
    reference = by_timm(backbone, images)
    torch.testing.assert_close(backbone(images), reference, **CLOSE)
    torch.testing.assert_close(
        by_hand(backbone, images)[:, 0], reference, **CLOSE
    )  # so that the reference below can be trusted
    assert reference.std(0).min() > 0.01  # features do depend on the image


def test_pixels_are_normalised_per_channel_and_back(backbone):
    """Compare with (0.9 - mean) / std of each channel, by hand."""
    backbone = Backbone(
        replace(backbone.config, mean=(0.4, 0.5, 0.9), std=(0.5, 0.2, 0.1)), backbone.weights
    )
    normalised = backbone.normalise(torch.full((2, 3, 1, 1), 0.9, dtype=torch.float64))
    expected = (
        torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64).view(1, 3, 1, 1).expand(2, -1, 1, 1)
    )
    torch.testing.assert_close(normalised, expected, **CLOSE)
    pixels = backbone.raw_pixels(normalised)
    torch.testing.assert_close(pixels, torch.full_like(pixels, 0.9), **CLOSE)


@pytest.mark.parametrize("plugs", ["lora", "prefix", "tokens", "deep"])
def test_empty_plugs_change_nothing(backbone, images, plugs):
    d, m = backbone.dim, backbone.config.mlp_dim
    sizes = {"fc1": (d, m), "fc2": (m, d)}
    empty = {
        "lora": {
            f"lora.{i}.{part}.{side}": torch.zeros(shape)
            for i in range(6)
            for part in LORA_PARTS
            for side, shape in {
                "a": (0, sizes.get(part, (d, d))[0]),
                "b": (sizes.get(part, (d, d))[1], 0),
            }.items()
        },
        "prefix": {f"prefix.{i}.{part}": torch.zeros(0, d) for i in range(6) for part in "kv"},
        "tokens": {"tokens": torch.zeros(0, d)},
        "deep": {f"deep.{i}": torch.zeros(0, d) for i in range(6)},
    }
    torch.testing.assert_close(backbone(images, empty[plugs]), by_timm(backbone, images), **CLOSE)


def test_full_plugs_replace_weights(backbone, images, noise):
    weights = {k: v + 0.1 * noise(*v.shape) for k, v in backbone.weights.items()}
    reference = Backbone(backbone.config, weights)(images)
    torch.testing.assert_close(
        backbone(images, {f"full.{k}": v for k, v in weights.items()}), reference, **CLOSE
    )
    assert not torch.allclose(reference, backbone(images), atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "cls_token",
        "pos_embed",
        "patch_embed.proj.bias",
        "blocks.3.attn.qkv.bias",
        "blocks.5.norm2.weight",
        "norm.bias",
    ],
)
def test_one_full_plug_replaces_only_its_weight(backbone, images, noise, name):
    weight = noise(*backbone.weights[name].shape)
    reference = by_timm(Backbone(backbone.config, {**backbone.weights, name: weight}), images)
    torch.testing.assert_close(backbone(images, {f"full.{name}": weight}), reference, **CLOSE)


def test_full_weights_are_copies_of_backbone_weights(backbone, images):
    plugs = backbone.to(dtype=torch.float32).full_weights()
    assert {k.removeprefix("full.") for k in plugs} == backbone.weights.keys()
    torch.testing.assert_close(backbone(images, plugs), backbone(images), rtol=1e-5, atol=1e-5)
    plugs["full.norm.bias"] += 1  # a copy: the frozen weight must not follow
    torch.testing.assert_close(
        backbone.weights["norm.bias"],
        Backbone(backbone.config, backbone.weights).weights["norm.bias"],
    )
    assert backbone.to(dtype=torch.bfloat16).full_weights()["full.norm.bias"].dtype == torch.float32


@pytest.mark.parametrize("part", LORA_PARTS)
@pytest.mark.parametrize("block", [0, 5])
def test_lora_adds_product_to_weight(backbone, images, noise, part, block):
    fan_in, fan_out = backbone.lora_shape(part)
    a, b = noise(3, fan_in), 0.2 * noise(fan_out, 3)
    weights = {k: v.clone() for k, v in backbone.weights.items()}
    if part in "qkv":
        row = "qkv".index(part) * backbone.dim
        weights[f"blocks.{block}.attn.qkv.weight"][row : row + backbone.dim] += b @ a
    else:
        weights[f"blocks.{block}.{'attn' if part == 'proj' else 'mlp'}.{part}.weight"] += b @ a
    reference = by_timm(Backbone(backbone.config, weights), images)
    torch.testing.assert_close(
        backbone(images, {f"lora.{block}.{part}.a": a, f"lora.{block}.{part}.b": b}),
        reference,
        **CLOSE,
    )
    assert not torch.allclose(reference, backbone(images), atol=1e-4)


def test_zero_lora_keeps_forward_bitwise_equal(backbone, images, noise):
    plugs = {
        "lora.0.q.a": noise(4, 32),
        "lora.0.q.b": torch.zeros(32, 4),
        "lora.2.fc1.a": noise(4, 32),
        "lora.2.fc1.b": torch.zeros(64, 4),
    }
    assert torch.equal(backbone(images, plugs), backbone(images))


def test_prefix_rows_join_keys_and_values_after_projection(backbone, images, noise):
    prefix = {i: (noise(4, 32), noise(4, 32)) for i in (0, 2, 5)}
    plugs = {
        f"prefix.{i}.{part}": rows
        for i, pair in prefix.items()
        for part, rows in zip("kv", pair, strict=True)
    }
    torch.testing.assert_close(
        backbone(images, plugs), by_hand(backbone, images, prefix=prefix)[:, 0], **CLOSE
    )


def test_permuting_prefix_rows_jointly_changes_nothing(backbone, images, noise):
    k, v, order = noise(5, 32), noise(5, 32), torch.tensor([3, 0, 4, 1, 2])
    together = backbone(images, {"prefix.1.k": k[order], "prefix.1.v": v[order]})
    torch.testing.assert_close(
        together, backbone(images, {"prefix.1.k": k, "prefix.1.v": v}), **CLOSE
    )
    assert not torch.allclose(
        together, backbone(images, {"prefix.1.k": k[order], "prefix.1.v": v}), atol=1e-4
    )


def test_repeated_prefix_row_adds_log_count_to_logit(noise):
    """Add log L to the logit of a prefix row that is repeated L times.

    For this reason HGP's all-equal prefix acts as one pair with a bonus of log L.
    """
    query, key, value = noise(2, 4, 6, 8), noise(2, 4, 6, 8), noise(2, 4, 6, 8)
    k, v, count = noise(2, 4, 1, 8), noise(2, 4, 1, 8), 7
    output = attend(
        query,
        torch.cat([k.expand(-1, -1, count, -1), key], 2),
        torch.cat([v.expand(-1, -1, count, -1), value], 2),
    )
    scores = torch.cat(
        [query @ k.mT / math.sqrt(8) + math.log(count), query @ key.mT / math.sqrt(8)], -1
    )
    torch.testing.assert_close(output, scores.softmax(-1) @ torch.cat([v, value], 2), **CLOSE)


def test_prompt_tokens_are_prepended_and_pooled_by_mean(backbone, images, noise):
    tokens = noise(4, 32)
    reference = by_hand(backbone, images, tokens=tokens)
    torch.testing.assert_close(
        backbone(images, {"tokens": tokens}, pool="prompt"), reference[:, :4].mean(1), **CLOSE
    )
    torch.testing.assert_close(
        backbone(images, {"tokens": tokens}, pool="cls"), reference[:, 4], **CLOSE
    )


def test_prompt_tokens_of_block_stay_in_later_blocks(backbone, images, noise):
    """Compare tokens of block 0 with prompts in front; later tokens stay from their block on."""
    prompts = noise(3, 32)
    for plug, same in (("tokens.0", "tokens"), ("tokens.5", "deep.5")):
        torch.testing.assert_close(
            backbone(images, {plug: prompts}), backbone(images, {same: prompts}), **CLOSE
        )
    plugs = {"tokens.3": prompts, "deep.4": noise(2, 32)}
    taps = backbone.features_and_taps(images, [f"blocks.{i}" for i in range(6)], plugs)[1]
    number = taps["blocks.0"].shape[1]
    assert [tap.shape[1] - number for tap in taps.values()] == [0, 0, 0, 3, 3, 3]


def test_outputs_of_deep_tokens_are_dropped(backbone, images, noise):
    deep = {0: noise(3, 32), 1: noise(3, 32), 5: noise(2, 32)}
    torch.testing.assert_close(
        backbone(images, {f"deep.{i}": rows for i, rows in deep.items()}),
        by_hand(backbone, images, deep=deep)[:, 0],
        **CLOSE,
    )


def test_adapters_are_parallel_to_mlp(backbone, images, noise):
    """Add adapters parallel to the MLP, before its norm.

    With up and its bias at zero not a bit changes.
    """
    parts = {i: (noise(5, 32), noise(5), noise(32, 5), noise(32)) for i in (0, 3, 5)}
    names = "down", "down_bias", "up", "up_bias"
    plugs = {
        f"adapter.{i}.{n}": v
        for i, tensors in parts.items()
        for n, v in zip(names, tensors, strict=True)
    }
    reference = by_hand(backbone, images, adapter=parts)[:, 0]
    torch.testing.assert_close(backbone(images, plugs), reference, **CLOSE)
    assert not torch.allclose(reference, backbone(images), atol=1e-3)
    still = {name: v * 0 if ".up" in name else v for name, v in plugs.items()}
    assert torch.equal(backbone(images, still), backbone(images))


def test_all_prompt_kinds_combine(backbone, images, noise):
    tokens, deep, prefix = (
        noise(2, 32),
        {1: noise(3, 32), 5: noise(1, 32)},
        {1: (noise(2, 32), noise(2, 32)), 5: (noise(1, 32), noise(1, 32))},
    )
    plugs = {"tokens": tokens, **{f"deep.{i}": rows for i, rows in deep.items()}}
    plugs |= {
        f"prefix.{i}.{part}": rows
        for i, pair in prefix.items()
        for part, rows in zip("kv", pair, strict=True)
    }
    reference = by_hand(backbone, images, tokens, deep, prefix)
    torch.testing.assert_close(
        backbone(images, plugs, pool="prompt"), reference[:, :2].mean(1), **CLOSE
    )
    torch.testing.assert_close(backbone(images, plugs), reference[:, 2], **CLOSE)


def test_plugs_may_differ_between_images(backbone, images, noise):
    plugs = {
        "tokens": noise(3, 2, 32),
        "deep.2": noise(3, 4, 32),
        "prefix.0.k": noise(3, 5, 32),
        "prefix.0.v": noise(3, 5, 32),
    }
    one_by_one = [
        backbone(images[i : i + 1], {k: v[i] for k, v in plugs.items()}) for i in range(3)
    ]
    torch.testing.assert_close(backbone(images, plugs), torch.cat(one_by_one), **CLOSE)


def test_class_token_includes_position_embedding(backbone):
    torch.testing.assert_close(
        backbone.class_token(),
        backbone.weights["cls_token"][0, 0] + backbone.weights["pos_embed"][0, 0],
        **CLOSE,
    )


@pytest.mark.parametrize(
    "plug",
    [
        "lora.6.q.a",
        "lora.0.w.a",
        "lora.0.q.c",
        "lora.0.q",
        "prefix.9.k",
        "prefix.0.q",
        "deep.6",
        "deep",
        "tokens.6",
        "full.head.weight",
        "ful.norm.bias",
        "",
    ],
)
def test_unknown_plugs_are_rejected(backbone, images, plug):
    with pytest.raises(FczooError, match="unknown plug") as error:
        backbone(images, {plug: torch.zeros(1, 32)})
    assert repr(plug) in str(error.value) and "\n" not in str(error.value)


def test_unknown_lora_parts_and_blocks_are_rejected(backbone):
    with pytest.raises(FczooError, match="no LoRA on 'qkv'"):
        backbone.lora_shape("qkv")
    backbone.check_blocks((0, 5), "method.blocks")
    with pytest.raises(
        FczooError, match=r"method\.blocks names block 6, but vit_test has blocks 0 to 5"
    ):
        backbone.check_blocks((0, 6), "method.blocks")
    with pytest.raises(FczooError, match=r"method\.blocks is empty"):
        backbone.check_blocks((), "method.blocks")


def test_missing_or_misshapen_weights_are_rejected(backbone):
    lacking = {k: v for k, v in backbone.weights.items() if k != "norm.bias"}
    misshapen = {**backbone.weights, "norm.bias": torch.zeros(31)}
    for weights in (lacking, misshapen, {**backbone.weights, "head.weight": torch.zeros(2, 32)}):
        says = (
            r"weights do not fit vit_test: (norm\.bias (is missing|has shape)|head\.weight has "
            r"shape)"
        )
        with pytest.raises(FczooError, match=says):
            Backbone(backbone.config, weights)


def test_frozen_weights_are_copies(backbone):
    weights = {k: v.clone().requires_grad_() for k, v in backbone.weights.items()}
    copy = Backbone(backbone.config, weights)
    with torch.no_grad():
        weights["norm.bias"].add_(1)
    assert torch.equal(copy.weights["norm.bias"], backbone.weights["norm.bias"])
    assert not any(v.requires_grad for v in copy.weights.values())
