"""Test the ViT with plugs for many clients at once, and in other number types."""

import math

import pytest
import torch
from torch import Tensor

from fczoo.core.vit_forward import attend
from helpers_backbone import CLOSE


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(
        3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_vmap_over_clients_equals_loop(backbone, noise):
    images = noise(2, 3, 3, 16, 16)  # two clients
    shapes = {
        "lora.0.q.a": (2, 32),
        "lora.0.q.b": (32, 2),
        "prefix.1.k": (3, 32),
        "prefix.1.v": (3, 32),
        "tokens": (2, 32),
        "deep.4": (2, 32),
    }
    plugs = {k: noise(2, *shape).requires_grad_() for k, shape in shapes.items()}
    together = torch.vmap(lambda x, p: backbone(x, p))(images, plugs)
    loop = torch.stack([backbone(images[i], {k: v[i] for k, v in plugs.items()}) for i in range(2)])
    torch.testing.assert_close(together, loop, **CLOSE)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), list(plugs.values())) for out in (together, loop)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_attention_matches_formula_in_vmap_and_bfloat16(noise):
    query, key, value = noise(2, 4, 3, 8), noise(2, 4, 7, 8), noise(2, 4, 7, 8)
    reference = attend(query, key, value)
    torch.testing.assert_close(
        torch.vmap(attend)(query[None], key[None], value[None])[0], reference, **CLOSE
    )  # inside vmap: written out
    torch.testing.assert_close(
        reference, (query @ key.mT / math.sqrt(8)).softmax(-1) @ value, **CLOSE
    )
    half = attend(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), reference, rtol=0.05, atol=0.05)


def test_bfloat16_is_close_to_float32(backbone, images):
    """Compute features in bfloat16 within a tenth of those in float32.

    Eight bits of mantissa pass through six blocks; the features are float32 at the end.
    """
    single, half = backbone.to(dtype=torch.float32), backbone.to(dtype=torch.bfloat16)
    features = half(images)
    assert features.dtype == torch.float32 and half.dtype == torch.bfloat16
    assert (features - single(images)).square().mean().sqrt() < 0.1 * single(
        images
    ).square().mean().sqrt()
    torch.testing.assert_close(single(images).double(), backbone(images), rtol=1e-4, atol=1e-4)


def test_float32_plugs_get_gradients_in_bfloat16_backbone(backbone, images, noise):
    half = backbone.to(dtype=torch.bfloat16)
    prefix = {
        "prefix.0.k": noise(2, 32).float().requires_grad_(),
        "prefix.0.v": noise(2, 32).float(),
    }
    half(images, prefix).sum().backward()
    assert prefix["prefix.0.k"].grad.dtype == torch.float32
    assert prefix["prefix.0.k"].grad.abs().max() > 0
