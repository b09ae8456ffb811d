"""The forward pass of timm and one written by hand, to compare with, and invalid weights."""

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fczoo import FczooError, load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig
from fczoo.core.vit_forward import ForwardPass

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64


def timm_model(backbone: Backbone) -> VisionTransformer:
    c = backbone.config
    model = VisionTransformer(
        c.image_size,
        c.patch_size,
        embed_dim=c.dim,
        depth=c.depth,
        num_heads=c.heads,
        mlp_ratio=c.mlp_dim / c.dim,
        num_classes=0,
    )
    model.to(backbone.dtype).load_state_dict(backbone.weights)
    return model.eval()


def attention_of(backbone: Backbone, tokens: Tensor, rows: int, plugs: Tree) -> Tensor:
    """Compute the attention of the first block for the first ``rows`` of tokens [B, N, D]."""
    forward = ForwardPass(backbone.config, backbone.weights, plugs, {})
    return forward._attention(tokens, 0, slice(0, rows), 0)


def by_timm(backbone: Backbone, images: Tensor) -> Tensor:
    with torch.no_grad():
        return timm_model(backbone)(images)


def by_hand(
    backbone: Backbone,
    images: Tensor,
    tokens: Tensor | None = None,
    deep: dict | None = None,
    prefix: dict | None = None,
    adapter: dict | None = None,
) -> Tensor:
    """Compute all outputs of the last block, one image, one block and one head after the other.

    Args:
        backbone: The ViT whose weights are used.
        images: Images [B, 3, S, S].
        tokens: Rows in front of the sequence [tokens, D].
        deep: Rows behind the sequence of a block [rows, D], by block.
        prefix: Keys and values in front of those of a block, each [rows, D], by block.
        adapter: Weights and biases (down, down_bias, up, up_bias), by block.

    Returns:
        The outputs after the norm [B, tokens + 1 + patches, D].
    """
    w, c = backbone.weights, backbone.config
    size = c.dim // c.heads

    def norm(x: Tensor, name: str) -> Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        return (
            deviation
            / (deviation.square().mean(-1, keepdim=True) + c.eps).sqrt()
            * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].mT + w[f"{name}.bias"]

    out = []
    for image in images:
        patches = image.unfold(1, c.patch_size, c.patch_size).unfold(
            2, c.patch_size, c.patch_size
        )  # [3, rows, columns, p, p]
        patches = (
            patches.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)
            @ w["patch_embed.proj.weight"].flatten(1).mT
            + w["patch_embed.proj.bias"]
        )
        x = torch.cat([w["cls_token"][0], patches]) + w["pos_embed"][0]
        if tokens is not None:
            x = torch.cat([tokens, x])
        for i in range(c.depth):
            keep = len(x)
            if deep and i in deep:
                x = torch.cat([x, deep[i]])
            query, key, value = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").split(
                c.dim, -1
            )
            if prefix and i in prefix:
                key, value = torch.cat([prefix[i][0], key]), torch.cat([prefix[i][1], value])
            heads = []
            for h in range(c.heads):
                columns = slice(h * size, (h + 1) * size)
                scores = query[:, columns] @ key[:, columns].mT / math.sqrt(size)
                weights = scores.exp() / scores.exp().sum(1, keepdim=True)
                heads.append(weights @ value[:, columns])
            x = x + linear(torch.cat(heads, 1), f"blocks.{i}.attn.proj")
            inner = linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            beside = torch.zeros_like(x)
            if adapter and i in adapter:
                down, down_bias, up, up_bias = adapter[i]
                beside = 0.1 * ((x @ down.mT + down_bias).clamp(min=0) @ up.mT + up_bias)
            x = (x + linear(inner, f"blocks.{i}.mlp.fc2") + beside)[:keep]
        out.append(norm(x, "norm"))
    return torch.stack(out)


def refusal_of(spec: object, **options) -> str:
    """Return the one line with which ``load_backbone`` refuses a backbone.

    Args:
        spec: The backbone as ``load_backbone`` takes it.
        options: Further options of ``load_backbone``.
    """
    with pytest.raises(FczooError) as error:
        load_backbone(str(spec), **options)
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def one_block(g: Tree, heads: int) -> Backbone:
    """Build a backbone whose only block has the recorded attention ``g``.

    Everything else is zero.

    Args:
        g: Recorded tensors; ``in.qkv_w``, ``in.qkv_b``, ``in.proj_w`` and ``in.proj_b`` are read.
        heads: Number of attention heads.
    """
    config = ViTConfig("one", image_size=8, patch_size=8, dim=24, depth=1, heads=heads, mlp_dim=8)
    weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    for layer in ("qkv", "proj"):
        for kind, short in (("weight", "w"), ("bias", "b")):
            weights[f"blocks.0.attn.{layer}.{kind}"] = g[f"in.{layer}_{short}"]
    return Backbone(config, weights)
