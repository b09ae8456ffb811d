"""Plain vision transformers by their timm names."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from fczoo.backbones.names import BUNDLED_NAME
from fczoo.core.backbone import ViTConfig
from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import nearest

BUNDLED = ViTConfig(BUNDLED_NAME, image_size=32, patch_size=4, dim=128, depth=6, heads=4, mlp_dim=512)
"""Pre-trained on Tiny-ImageNet by benchmarks/pretrain_vit_nano.py; weights ship with the package."""


CONNECTING = 5.0  # seconds for the first answer of the hub


def architecture(name: str) -> ViTConfig:
    """Configuration of a named backbone, without its weights."""
    return BUNDLED if name == BUNDLED.name else timm_config(name, timm_model(name, pretrained=False))


def input_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Input mean and standard deviation of a timm model by its name; 0.5 each for an unknown one."""
    import timm

    try:
        published = timm.models.get_pretrained_cfg(name) if timm.models.is_model(name) else None
    except RuntimeError:  # weights of one's own, named like an architecture of timm
        published = None
    return (tuple(published.mean), tuple(published.std)) if published else ((0.5,) * 3, (0.5,) * 3)


def from_timm(name: str) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Configuration and published weights of a timm model.

    Raises FczooError for an unknown name, for what is no plain ViT, and when the weights cannot be had.
    """
    config = architecture(name)  # refuses what is no plain ViT before anything is fetched
    return config, dict(timm_model(name, pretrained=True).state_dict())


def timm_model(name: str, pretrained: bool) -> Any:
    """The timm model of that name without a classification head, with random or published weights.

    Raises FczooError for an unknown name and when the weights cannot be had.
    """
    import timm

    architecture = name.split(".")[0]
    if not timm.models.is_model(architecture):
        names = [BUNDLED.name, *timm.list_models("vit_*")]
        raise FczooError(f"no backbone is called {name!r}; {nearest(architecture, names)}")
    try:
        # each failed try would warn; the error below says enough
        with _quiet("huggingface_hub", "timm"), _cache_alone_offline(pretrained):
            return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # the hub client raises errors of several libraries
        problem = f"cannot get the weights of {name}: {first_line(error)}"
        advice = f"without network give a file: --backbone {name}:FILE.safetensors"
        raise FczooError(f"{problem}; {advice}") from error


@contextmanager
def _cache_alone_offline(asked: bool) -> Iterator[None]:
    """Inside it a hub that cannot be reached is not asked again and again, which takes a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or (asked and not _reachable(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(address: str) -> bool:
    """Whether a server answers at all; behind a proxy only asking it would tell."""
    where = urlsplit(address)
    if getproxies():
        return True
    try:
        socket.create_connection((where.hostname or "", where.port or 443), timeout=CONNECTING).close()
    except OSError:
        return False
    return True


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Only errors of these loggers are shown inside."""
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def timm_config(name: str, model: Any) -> ViTConfig:
    """Configuration of a timm model. Raises FczooError naming what makes it other than a plain ViT."""
    from timm.models.vision_transformer import Block, VisionTransformer

    def refuse(reason: str) -> None:
        raise FczooError(f"{name} is no plain ViT: {reason}; use a vit_*_patch*_* model with a class token")

    if type(model) is not VisionTransformer:
        refuse(f"it is a {type(model).__name__}")
    block, published = model.blocks[0], model.pretrained_cfg
    exact_gelu = isinstance(block.mlp.act, torch.nn.GELU) and block.mlp.act.approximate == "none"
    if type(block) is not Block or not exact_gelu:
        refuse("its blocks are not pre-norm blocks with exact GELU")
    if model.global_pool != "token" or getattr(model, "no_embed_class", False):
        refuse("it does not pool a class token with a position embedding")
    config = ViTConfig(
        name,
        model.patch_embed.img_size[0],
        model.patch_embed.patch_size[0],
        model.embed_dim,
        len(model.blocks),
        block.attn.num_heads,
        block.mlp.fc1.out_features,
        model.norm.eps,
        tuple(published["mean"]),
        tuple(published["std"]),
    )
    extra = {k for k in model.state_dict() if not k.startswith("head.")} ^ config.shapes().keys()
    if extra:
        refuse(f"its tensor {min(extra)} has no place in one")
    return config
