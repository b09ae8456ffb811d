"""Test every family of vision transformers with all plugs against timm's modules."""

import pytest
import torch
import torch.nn.functional as F

from fczoo import FczooError
from fczoo.core.backbone import Backbone
from fczoo.core.vit_forward import ADAPTER_SCALE
from helpers_families import (
    DEPTH,
    FAMILIES,
    adapters_in_blocks,
    family_backbone,
    family_images,
    forward_with_tokens,
    prefixes_in_attention,
    random_plugs,
    timm_family,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KINDS = ("lora", "prefix", "tokens", "deep", "adapter", "full")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Return timm's small model, the backbone with its weights, images and plugs by kind."""
    torch.set_num_threads(1)
    model = timm_family(request.param)
    backbone = family_backbone(model)
    plugs = random_plugs(backbone, torch.Generator().manual_seed(2))
    return model, backbone, family_images(backbone), plugs


def reference(model, images):
    with torch.no_grad():
        return model(images)


def pool_tokens(model, tokens, prompts):
    """Pool output tokens with ``prompts`` rows in front as timm's model does."""
    with torch.no_grad():
        return model.fc_norm(model.pool(tokens[:, prompts:]))


def test_backbone_without_plugs_matches_timm(family):
    model, backbone, images, _ = family
    features = backbone(images)
    torch.testing.assert_close(features, reference(model, images), **CLOSE)
    assert features.std(0).mean() > 0.05  # features depend on the image
    assert backbone.config.tokens == model.num_prefix_tokens + 9


def test_lora_matches_changed_weights(family):
    _, backbone, images, plugs = family
    weights = {k: v.clone() for k, v in backbone.weights.items()}
    for part in ("q", "k", "v", "proj", "fc1", "fc2"):
        change = plugs["lora"][f"lora.0.{part}.b"] @ plugs["lora"][f"lora.0.{part}.a"]
        if part in "qkv":
            first = "qkv".index(part) * backbone.config.dim
            weights["blocks.0.attn.qkv.weight"][first : first + backbone.config.dim] += change
        else:
            weights[f"blocks.0.{'attn' if part == 'proj' else 'mlp'}.{part}.weight"] += change
    expected = Backbone(backbone.config, weights)(images)
    torch.testing.assert_close(backbone(images, plugs["lora"]), expected, rtol=1e-4, atol=1e-4)


def test_prefixes_match_timm_attention(family):
    model, backbone, images, plugs = family
    pair = tuple(plugs["prefix"][f"prefix.{DEPTH - 1}.{part}"] for part in "kv")
    with prefixes_in_attention({DEPTH - 1: pair}):
        expected = reference(model, images)
    torch.testing.assert_close(backbone(images, plugs["prefix"]), expected, **CLOSE)


def test_prompts_match_timm_blocks(family):
    """Put prompts in front of the first block, without position embeddings."""
    model, backbone, images, plugs = family
    tokens = plugs["tokens"]["tokens"]
    output = forward_with_tokens(model, images, tokens, {})
    features = backbone(images, plugs["tokens"])
    torch.testing.assert_close(features, pool_tokens(model, output, len(tokens)), **CLOSE)
    prompts = backbone(images, plugs["tokens"], pool="prompt")
    assert prompts.shape == features.shape
    if model.attn_pool is None and not backbone.config.norm_after_pool:
        torch.testing.assert_close(prompts, output[:, : len(tokens)].mean(1), **CLOSE)


def test_deep_prompts_match_timm_blocks(family):
    model, backbone, images, plugs = family
    deep = {i: plugs["deep"][f"deep.{i}"] for i in range(DEPTH)}
    output = forward_with_tokens(model, images, plugs["tokens"]["tokens"][:0], deep)
    torch.testing.assert_close(
        backbone(images, plugs["deep"]), pool_tokens(model, output, 0), **CLOSE
    )


def test_adapters_match_timm_blocks(family):
    model, backbone, images, plugs = family
    last = DEPTH - 1
    down, down_bias, up, up_bias = (
        plugs["adapter"][f"adapter.{last}.{part}"]
        for part in ("down", "down_bias", "up", "up_bias")
    )

    def adapter(x):
        return ADAPTER_SCALE * F.linear(F.linear(x, down, down_bias).relu(), up, up_bias)

    with adapters_in_blocks(model, {last: adapter}):
        expected = reference(model, images)
    torch.testing.assert_close(backbone(images, plugs["adapter"]), expected, **CLOSE)


def test_full_weights_replace_frozen_weights(family):
    _, backbone, images, plugs = family
    weights = {name.removeprefix("full."): value for name, value in plugs["full"].items()}
    expected = Backbone(backbone.config, weights)(images)
    torch.testing.assert_close(backbone(images, plugs["full"]), expected, **CLOSE)
    assert not torch.allclose(expected, backbone(images), atol=1e-3)


def test_batched_clients_match_single_clients(family):
    """Run two clients with all kinds of plugs at once under vmap."""
    _, backbone, images, plugs = family
    one = {name: value for kind in KINDS for name, value in plugs[kind].items()}
    rng = torch.Generator().manual_seed(3)
    both = {
        name: torch.stack([value, value + 0.05 * torch.randn(value.shape, generator=rng)])
        for name, value in one.items()
    }
    leaves = {name: value.clone().requires_grad_() for name, value in both.items()}
    inputs = torch.stack([images, images.flip(-1)])
    together = torch.vmap(lambda tree, x: backbone(x, tree))(leaves, inputs)
    gradients = torch.autograd.grad(together.square().sum(), list(leaves.values()))
    for client in range(2):
        tree = {name: value[client].clone().requires_grad_() for name, value in both.items()}
        features = backbone(inputs[client], tree)
        torch.testing.assert_close(together[client], features, rtol=1e-4, atol=1e-4)
        single = torch.autograd.grad(features.square().sum(), list(tree.values()))
        for name, value, other in zip(tree, gradients, single, strict=True):
            scale = other.abs().max() + 1e-6
            assert ((value[client] - other).abs().max() / scale) < 1e-3, name
    assert all(gradient.any() for gradient in gradients)


def test_taps_match_timm_layers(family):
    model, backbone, images, _ = family
    values = {}
    names = [f"blocks.{i}{layer}" for i in range(DEPTH) for layer in ("", ".attn.proj", ".mlp.fc2")]
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, x, out, name=name: values.update(
                {name: out if name.count(".") == 1 else x[0]}
            )
        )
        for name in names
    ]
    expected = reference(model, images)
    for handle in handles:
        handle.remove()
    features, taps = backbone.features_and_taps(images, names)
    torch.testing.assert_close(features, expected, **CLOSE)
    for name in names:
        torch.testing.assert_close(taps[name], values[name], **CLOSE)


def test_class_token_matches_timm(family):
    model, backbone, images, _ = family
    if not backbone.config.class_token:
        with pytest.raises(FczooError, match="has no class token"):
            backbone.class_token()
        return
    inputs = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    reference(model, images)
    handle.remove()
    torch.testing.assert_close(backbone.class_token(), inputs[0][0, 0], **CLOSE)
