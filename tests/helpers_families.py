"""Small models of every family of vision transformers, and timm's forward with plugs added."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.backbones.timm_vit import common_names, vit_config
from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree

DEPTH, DIM, HEADS = 2, 48, 3
FAMILIES = {  # timm's name -> other arguments of the small model
    "vit_tiny_patch16_224": {},
    "vit_base_patch16_224_miil": {},
    "deit3_small_patch16_224": {},
    "vit_small_patch14_dinov2": {},
    "vit_small_patch14_reg4_dinov2": {},
    "vit_giant_patch14_reg4_dinov2": {},  # SwiGLU
    "vit_small_patch16_dinov3": {},
    "vit_small_plus_patch16_dinov3": {},  # SwiGLU with separate gate
    "vit_base_patch16_clip_224": {},
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_so400m_patch16_siglip_256": {"mlp_ratio": 3.5},  # tanh approximation of GELU
    "vit_base_patch16_siglip_gap_224": {},
    "vit_medium_patch16_reg4_gap_256": {},
    "eva_giant_patch14_224": {"mlp_ratio": 3.5},
    "eva02_tiny_patch14_224": {},  # packed SwiGLU
    "eva02_base_patch14_448": {},  # separate q, k and v, norm in the MLP
    "eva02_base_patch16_clip_224": {},  # norm of the attention's output
}


def timm_family(name: str, **changes: Any) -> Any:
    """Return timm's model of a family with small random weights, of 3 x 3 patches."""
    patch = 14 if "patch14" in name else 16
    arguments = {"depth": DEPTH, "embed_dim": DIM, "num_heads": HEADS, "img_size": 3 * patch}
    model = timm.create_model(name, num_classes=0, **{**arguments, **FAMILIES[name], **changes})
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=rng)
            is_matrix = value.dim() > 1 and key.endswith("weight")
            scale = value[0].numel() ** -0.5 if is_matrix else 0.3
            value.copy_(scale * noise + float("norm" in key and key.endswith("weight")))
    return model.eval()


def family_backbone(model: Any) -> Backbone:
    """Return the backbone with the weights of a timm model."""
    name = model.pretrained_cfg["architecture"]
    return Backbone(vit_config(name, model), common_names(model.state_dict()))


def family_images(backbone: Backbone, count: int = 2) -> Tensor:
    """Return random images of a backbone's size."""
    side, rng = backbone.config.image_size, torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=rng)


def forward_with_tokens(
    model: Any, images: Tensor, tokens: Tensor, deep: dict[int, Tensor]
) -> Tensor:
    """Compute timm's output tokens with prompts in front, and ``deep`` ones per block.

    The deep ones are in front as well: attention does not depend on the order of tokens.
    """
    rope = getattr(model, "rope", None)
    with torch.no_grad():
        hidden = model._pos_embed(model.patch_embed(images))
        hidden, angles = hidden if rope is not None else (hidden, None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        hidden = model.norm_pre(hidden)
        hidden = torch.cat([tokens.expand(len(images), -1, -1), hidden], 1)
        for i, block in enumerate(model.blocks):
            rows = deep.get(i, tokens[:0]).expand(len(images), -1, -1)
            extra = torch.cat([rows, hidden], 1)
            if angles is None:
                out = block(extra)
            else:
                block.attn.num_prefix_tokens = (
                    model.num_prefix_tokens + rows.shape[1] + tokens.shape[0]
                )
                out = block(extra, rope=angles)
                block.attn.num_prefix_tokens = model.num_prefix_tokens
            hidden = out[:, rows.shape[1] :]
        return model.norm(hidden)


@contextmanager
def prefixes_in_attention(prefixes: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let timm's attention see rows in front of its keys and values, by block."""
    attention, calls = F.scaled_dot_product_attention, iter(range(100))

    def heads(rows: Tensor, like: Tensor) -> Tensor:
        return rows.unflatten(-1, (HEADS, -1)).transpose(0, 1).expand(len(like), -1, -1, -1)

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if pair := prefixes.get(next(calls)):
            key = torch.cat([heads(pair[0], key), key], 2)
            value = torch.cat([heads(pair[1], value), value], 2)
        return attention(query, key, value, **options)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


@contextmanager
def adapters_in_blocks(
    model: Any, adapters: dict[int, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Let timm's blocks add a function of what enters norm2 to their output."""
    handles, inputs = [], {}
    for i, adapter in adapters.items():
        block = model.blocks[i]
        handles.append(
            block.norm2.register_forward_pre_hook(lambda _, x, i=i: inputs.update({i: x[0]}))
        )
        handles.append(
            block.register_forward_hook(lambda _, __, out, i=i, f=adapter: out + f(inputs[i]))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def random_plugs(backbone: Backbone, rng: torch.Generator) -> dict[str, Tree]:
    """Return plugs of every kind, by kind."""
    d, last = backbone.config.dim, DEPTH - 1

    def noise(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=rng)

    lora = {}
    for part in ("q", "k", "v", "proj", "fc1", "fc2"):
        width, out = backbone.lora_shape(part)
        lora |= {f"lora.0.{part}.a": noise(2, width), f"lora.0.{part}.b": noise(out, 2)}
    adapter = {"down": (5, d), "down_bias": (5,), "up": (d, 5), "up_bias": (d,)}
    return {
        "lora": lora,
        "prefix": {f"prefix.{last}.{p}": noise(3, d) for p in "kv"},
        "tokens": {"tokens": noise(2, d)},
        "deep": {f"deep.{i}": noise(2, d) for i in range(DEPTH)},
        "adapter": {f"adapter.{last}.{p}": noise(*shape) for p, shape in adapter.items()},
        "full": {k: v + 0.1 * noise(*v.shape) for k, v in backbone.full_weights().items()},
    }
