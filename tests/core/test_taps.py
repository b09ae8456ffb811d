"""Test taps in the backbone: inputs of linear layers and outputs of blocks."""

import pytest
import torch
from torch import Tensor

from fczoo import FczooError
from fczoo.core.backbone import LAYERS
from helpers_backbone import CLOSE, timm_model


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(
        3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_taps_match_timm_layers(backbone, images):
    """Record what timm's layers receive.

    This also holds in the last block, where a call reads only the class token.
    """
    model, layer_values = timm_model(backbone), {}

    def make_hook(name):
        return lambda module, inputs, output: layer_values.update(
            {name: output if name.count(".") == 1 else inputs[0]}
        )

    names = [f"blocks.{i}.{layer}" for i in (0, 5) for layer in LAYERS] + ["blocks.0", "blocks.5"]
    for name in names:
        model.get_submodule(name).register_forward_hook(make_hook(name))
    with torch.no_grad():
        reference = model(images)
    features, taps = backbone.features_and_taps(images, names)
    torch.testing.assert_close(features, reference, **CLOSE)
    assert taps.keys() == set(names) == layer_values.keys()
    for name in names:
        assert taps[name].shape[:2] == (3, 5)
        torch.testing.assert_close(taps[name], layer_values[name], **CLOSE)


def test_taps_include_prompt_tokens(backbone, images, noise):
    plugs = {"tokens": noise(2, backbone.dim), "deep.5": noise(1, backbone.dim)}
    features, taps = backbone.features_and_taps(images, ["blocks.5", "blocks.5.attn.qkv"], plugs)
    torch.testing.assert_close(features, backbone(images, plugs), **CLOSE)
    assert taps["blocks.5"].shape[1] == 7
    assert taps["blocks.5.attn.qkv"].shape[1] == 8


def test_taps_of_batched_clients_match_single_clients(backbone, images, noise):
    """Return each client its own taps under vmap."""
    lora = {"lora.5.fc2.a": noise(2, 1, 64), "lora.5.fc2.b": noise(2, 32, 1)}

    def gram(plugs, x):
        _, taps = backbone.features_and_taps(x, ["blocks.5"], plugs)
        rows = taps["blocks.5"].flatten(0, 1)
        return rows.mT @ rows

    together = torch.vmap(gram)(lora, torch.stack([images, images.flip(0)]))
    for k in range(2):
        single = gram({name: v[k] for name, v in lora.items()}, images)
        torch.testing.assert_close(together[k], single, **CLOSE)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("tap", ["blocks.6", "blocks.0.norm1", "blocks.0.attn", "x"])
def test_unknown_taps_are_rejected(backbone, images, tap):
    with pytest.raises(FczooError, match=f"unknown tap '{tap}'"):
        backbone.features_and_taps(images, [tap])
