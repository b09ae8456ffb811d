"""Plain vision transformers by their timm names."""

import logging
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from fczoo.backbones.names import (
    BUNDLED_NAME,
    EXAMPLES,
    UNSUPPORTED,
    full_name,
    registered_backbone,
    unknown_name_error,
)
from fczoo.backbones.weights import describe_head, weights_file
from fczoo.core.errors import FczooError, first_line
from fczoo.core.vit_config import Activation, Pool, Rope, ViTConfig

POOLS: dict[str, Pool] = {"token": "cls", "avg": "mean", "map": "attention"}
_PARTS_OF_QKV = {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_bias", "v_bias"}


def vit_config(name: str, model: Any) -> ViTConfig:
    """Return the configuration of a timm model.

    Args:
        name: Name for the configuration.
        model: Model without classification head.

    Raises:
        FczooError: The model is not a plain ViT; the message has the reason.
    """
    try:
        return _read_config(name, model)
    except ValueError as error:
        raise FczooError(
            f"{name} is not a plain ViT: {error}; {UNSUPPORTED}; {EXAMPLES}"
        ) from error


def common_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a timm model under the names of ``ViTConfig.shapes``.

    Args:
        weights: State dict of a ``VisionTransformer`` or an ``Eva``, or an official release of
            DINOv2 or DINOv3.

    Returns:
        The same tensors. Separate projections of queries, keys and values become one, as do gate
        and value of SwiGLU; the bias of keys, which ``Eva`` does not have, is 0.
    """
    out: dict[str, Tensor] = {}
    weights = _dino_names(weights)
    for name, value in weights.items():
        block, _, part = name.rpartition(".attn.")
        mlp, _, layer = name.rpartition(".mlp.fc1_x.")
        if name.startswith("fc_norm."):
            out[name.removeprefix("fc_")] = value
        elif name.endswith((".gamma_1", ".gamma_2")):
            out[f"{name[:-8]}.ls{name[-1]}.gamma"] = value
        elif part == "q_proj.weight":
            parts = [weights[f"{block}.attn.{p}_proj.weight"] for p in "qkv"]
            out[f"{block}.attn.qkv.weight"] = torch.cat(parts)
        elif part in ("q_bias", "q_proj.bias"):
            key_bias = weights.get(f"{block}.attn.k_proj.bias", torch.zeros_like(value))
            value_bias = weights[f"{block}.attn.v{part[1:]}"]
            out[f"{block}.attn.qkv.bias"] = torch.cat([value, key_bias, value_bias])
        elif mlp:
            out[f"{mlp}.mlp.fc1.{layer}"] = torch.cat([weights[f"{mlp}.mlp.fc1_g.{layer}"], value])
        elif ".mlp.fc1_g." not in name and part not in _PARTS_OF_QKV:
            out[name] = value
    return out


def timm_names(weights: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return weights under the names of a timm model; the inverse of ``common_names``.

    Args:
        weights: Weights by the names of ``ViTConfig.shapes``.
        names: Names in the state dict of the timm model, without its classification head.

    Raises:
        FczooError: The timm model has no bias of keys, and that of ``weights`` is not 0.
    """
    out: dict[str, Tensor] = {}
    for name in names:
        block, _, part = name.rpartition(".attn.")
        mlp, _, layer = name.rpartition(".mlp.fc1_")
        if name.startswith("fc_norm."):
            out[name] = weights[name.removeprefix("fc_")]
        elif name.endswith((".gamma_1", ".gamma_2")):
            out[name] = weights[f"{name[:-8]}.ls{name[-1]}.gamma"]
        elif part in _PARTS_OF_QKV or part in ("q_proj.weight", "q_proj.bias", "q_bias"):
            kind = "weight" if part.endswith("weight") else "bias"
            parts = weights[f"{block}.attn.qkv.{kind}"].chunk(3)
            out[name] = parts["qkv".index(part[0])]
            if part[0] == "q" and f"{block}.attn.k{part[1:]}" not in names and parts[1].any():
                problem = f"{block} has a trained bias of the keys, which timm's model lacks"
                raise FczooError(f"{problem}; use --format torch")
        elif mlp:
            half = "gx".index(layer[0])
            out[name] = weights[f"{mlp}.mlp.fc1.{layer[2:]}"].chunk(2)[half]
        else:
            out[name] = weights[name]
    return out


def _dino_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of Meta's DINOv2 and DINOv3 releases in timm's names; others unchanged.

    Registers get timm's name. With registers, the position embedding of DINOv2's class token is
    added to the token, as in timm. The bias of DINOv3's keys is set to 0; if all biases of a
    model's queries, keys and values are 0, they are left out.
    """
    out = {re.sub(r"\.mlp\.w(12|3)\.", _fc_name, name): v for name, v in weights.items()}
    if "register_tokens" in out:
        out["reg_token"], position = out.pop("register_tokens"), out["pos_embed"]
        out["cls_token"] = out["cls_token"] + position[:, :1]
        out["pos_embed"] = position[:, 1:]
    if "storage_tokens" in out:
        out["reg_token"] = out.pop("storage_tokens")
        out = {name: v for name, v in out.items() if not name.endswith(".bias_mask")}
        for name in [name for name in out if name.endswith(".qkv.bias")]:
            query, key, value = out[name].chunk(3)
            out[name] = torch.cat([query, torch.zeros_like(key), value])
        if not any(out[name].any() for name in out if name.endswith(".qkv.bias")):
            out = {name: v for name, v in out.items() if not name.endswith(".qkv.bias")}
    return out


def _fc_name(match: re.Match[str]) -> str:
    return f".mlp.{'fc1' if match[1] == '12' else 'fc2'}."


def _read_config(name: str, model: Any) -> ViTConfig:
    from timm.layers.attention import Attention
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.eva import Eva, EvaAttention, EvaBlock
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) not in (VisionTransformer, Eva):
        _refuse(f"it is a {type(model).__name__}")
    if type(model.patch_embed) is not PatchEmbed:
        _refuse(f"its patch embedding is a {type(model.patch_embed).__name__}")
    block, is_eva = model.blocks[0], type(model) is Eva
    if type(block) not in (Block, EvaBlock):
        _refuse(f"its blocks are {type(block).__name__}s")
    if type(block.attn) not in (Attention, EvaAttention):
        _refuse(f"its attention is {type(block.attn).__name__}")
    sizes = {*model.patch_embed.img_size, *model.patch_embed.patch_size}
    if len(sizes) > 2 or model.global_pool not in POOLS:
        _refuse("its images or patches are not square, or it does not pool its tokens")
    swiglu, activation = _mlp_kind(block.mlp)
    shapes = {k: tuple(v.shape) for k, v in common_names(model.state_dict()).items()}
    config = ViTConfig(
        name,
        model.patch_embed.img_size[0],
        model.patch_embed.patch_size[0],
        model.embed_dim,
        len(model.blocks),
        block.attn.num_heads,
        block.mlp.fc2.in_features,
        _epsilon(model),
        tuple(model.pretrained_cfg["mean"]),
        tuple(model.pretrained_cfg["std"]),
        class_token=model.cls_token is not None,
        register_tokens=0 if model.reg_token is None else model.reg_token.shape[1],
        position="none"
        if model.pos_embed is None
        else "patches"
        if model.no_embed_class
        else "all",
        rope=_rope(model.rope) if is_eva and model.rope is not None else None,
        pre_norm="norm_pre.weight" in shapes,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        layer_scale="blocks.0.ls1.gamma" in shapes,
        activation=activation,
        swiglu=swiglu,
        attention_norm="blocks.0.attn.norm.weight" in shapes,
        mlp_norm="blocks.0.mlp.norm.weight" in shapes,
        pool=POOLS[model.global_pool],
        norm_after_pool="fc_norm.weight" in model.state_dict(),
    )
    shapes = {k: v for k, v in shapes.items() if not k.startswith("head.")}
    if shapes != config.shapes():
        different = shapes.items() ^ config.shapes().items()
        _refuse(f"its tensors differ from those of a plain ViT, such as {min(different)[0]}")
    if (
        config.pool == "attention"
        and config.prefix_tokens
        and (is_eva or model.pool_include_prefix)
    ):
        _refuse("its attention pooling reads the class token or registers")
    return config


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _mlp_kind(mlp: Any) -> tuple[bool, Activation]:
    """Return whether an MLP is a SwiGLU, and its activation otherwise."""
    from timm.layers.activations import QuickGELU
    from timm.layers.mlp import GluMlp, Mlp, SwiGLU

    activation = mlp.act
    gate_first = type(mlp) is GluMlp and not mlp.gate_last
    if (gate_first or type(mlp) is SwiGLU) and isinstance(activation, torch.nn.SiLU):
        return True, "gelu"
    if type(mlp) is not Mlp:
        _refuse(f"its MLP is a {type(mlp).__name__}")
    if isinstance(activation, QuickGELU):
        return False, "quick_gelu"
    approximate = {"GELU": getattr(activation, "approximate", "none"), "GELUTanh": "tanh"}
    kind = approximate.get(type(activation).__name__)
    if kind is None:
        _refuse(f"its activation is {type(activation).__name__}")
    return False, "gelu_tanh" if kind == "tanh" else "gelu"


def _rope(rope: Any) -> Rope:
    from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3

    if rope.grid_offset or rope.grid_indexing != "ij" or getattr(rope, "in_pixels", False):
        _refuse("its rotary positions are not those of EVA-02 or DINOv3")
    if type(rope) is RotaryEmbeddingDinoV3:
        if rope.temperature is None or rope.normalize_coords != "separate":
            _refuse("its rotary positions are not those of DINOv3")
        return Rope(rope.temperature, None, centred=True, halves=rope.rotate_half)
    if type(rope) is not RotaryEmbeddingCat:
        _refuse(f"its rotary positions are {type(rope).__name__}")
    grid: Any = rope.ref_feat_shape
    halves = getattr(rope, "rotate_half", False)  # timm before 1.0.30 interleaves here, always
    return Rope(float(rope.temperature), grid and grid[0], halves=halves)


def _epsilon(model: Any) -> float:
    """Return the epsilon of the norms, which must be one number."""
    values = {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)}
    if len(values) != 1:
        _refuse("its norms are not layer norms with one epsilon")
    return float(values.pop())


log = logging.getLogger("fczoo.backbones")
log.setLevel(logging.INFO)  # runs say what they drop

BUNDLED_CONFIG = ViTConfig(
    BUNDLED_NAME, image_size=32, patch_size=4, dim=128, depth=6, heads=4, mlp_dim=512
)
"""Pre-trained on Tiny-ImageNet by benchmarks/pretrain_vit_nano.py; weights are in the package."""

CONNECT_TIMEOUT = 5.0  # timeout of the connection to the hub, seconds


def architecture(name: str) -> ViTConfig:
    """Read the configuration of a named backbone, without creating its weights.

    Args:
        name: Bundled name, name of a plug-in, or timm name.

    Raises:
        FczooError: The name is unknown or not that of a plain ViT.
    """
    if name == BUNDLED_CONFIG.name:
        return BUNDLED_CONFIG
    if entry := registered_backbone(name):
        config = getattr(entry, "config", None)
        if not isinstance(config, ViTConfig):
            raise FczooError(
                f"backbone {entry.name} in {entry.__module__} has no config; set the class "
                "attribute config to a fczoo.core.vit_config.ViTConfig"
            )
        return replace(config, name=entry.name)
    with torch.device("meta"):  # random initialisation would take seconds
        return vit_config(name, timm_model(name, pretrained=False))


def input_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the input mean and standard deviation of a timm model; 0.5 each if it is unknown.

    Args:
        name: Name of a timm model.
    """
    import timm

    try:
        config = timm.models.get_pretrained_cfg(name) if timm.models.is_model(name) else None
    except RuntimeError:  # the user's weights, named like an architecture of timm
        config = None
    return (tuple(config.mean), tuple(config.std)) if config else ((0.5,) * 3, (0.5,) * 3)


def from_timm(name: str) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Load the configuration and published weights of a timm model.

    Args:
        name: Name of a timm model.

    Raises:
        FczooError: The name is unknown, the model is not a plain ViT, or the weights are not
            available.
    """
    config = architecture(name)  # rejects other models before the download
    model = timm_model(name, pretrained=True)
    outputs = model.pretrained_cfg.get("num_classes") or 0
    if head := describe_head(full_name(name), outputs):
        log.info("%s: dropped the checkpoint's %s", name, head)
    return config, common_names(model.state_dict())


def timm_model(name: str, pretrained: bool) -> Any:
    """Return a timm model without classification head, with random or published weights.

    Weights that ``fczoo bench --download`` stored take precedence over the hub.

    Args:
        name: Name of a timm model.
        pretrained: Whether it gets its published weights.

    Raises:
        FczooError: The name is unknown or the weights are not available.
    """
    import timm

    architecture = name.split(".")[0]
    if not timm.models.is_model(architecture):
        raise unknown_name_error(name)
    file = weights_file(full_name(name))
    local = {"file": str(file)} if pretrained and file.is_file() else None
    try:
        # hide the warning of each failed try; the error below is sufficient
        with (
            _show_only_errors("huggingface_hub", "timm"),
            _use_cache_if_offline(pretrained and not local),
        ):
            return timm.create_model(
                name, pretrained=pretrained, pretrained_cfg_overlay=local, num_classes=0
            )
    except Exception as error:  # the hub client raises errors of several libraries
        problem = f"cannot get the weights of {name}: {first_line(error)}"
        advice = f"without a network, give a file: --backbone {name}:FILE.safetensors"
        raise FczooError(f"{problem}; {advice}") from error


@contextmanager
def _use_cache_if_offline(needs_hub: bool) -> Iterator[None]:
    """Use only the cache while the hub is unreachable, as repeated tries take a minute."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or (needs_hub and not _is_reachable(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _is_reachable(address: str) -> bool:
    """Return whether a server accepts connections; True behind a proxy.

    Behind a proxy the connection itself does not show whether the server is reachable.
    """
    url = urlsplit(address)
    if getproxies():
        return True
    try:
        socket.create_connection(
            (url.hostname or "", url.port or 443), timeout=CONNECT_TIMEOUT
        ).close()
    except OSError:
        return False
    return True


@contextmanager
def _show_only_errors(*loggers: str) -> Iterator[None]:
    """Show only errors of these loggers inside the context."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
