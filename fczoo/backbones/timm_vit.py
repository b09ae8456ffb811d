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

from fczoo.backbones.names import BUNDLED_NAME, full_name, unknown_name
from fczoo.backbones.timm_layout import common_names, vit_config
from fczoo.backbones.weights import describe_head, weights_file
from fczoo.core.errors import FczooError, first_line
from fczoo.core.vit_config import ViTConfig

log = logging.getLogger("fczoo")

BUNDLED_CONFIG = ViTConfig(
    BUNDLED_NAME, image_size=32, patch_size=4, dim=128, depth=6, heads=4, mlp_dim=512
)
"""Pre-trained on Tiny-ImageNet by benchmarks/pretrain_vit_nano.py; weights are in the package."""

CONNECT_TIMEOUT = 5.0  # timeout of the connection to the hub, seconds


def architecture(name: str) -> ViTConfig:
    """Read the configuration of a named backbone, without creating its weights.

    Args:
        name: Bundled name, or timm name.

    Raises:
        FczooError: The name is unknown or not that of a plain ViT.
    """
    if name == BUNDLED_CONFIG.name:
        return BUNDLED_CONFIG
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
        raise unknown_name(name)
    file = weights_file(full_name(name))
    local = {"file": str(file)} if pretrained and file.is_file() else None
    try:
        # hide the warning of each failed try; the error below is sufficient
        with _quiet("huggingface_hub", "timm"), _use_cache_if_offline(pretrained and not local):
            return timm.create_model(
                name, pretrained=pretrained, pretrained_cfg_overlay=local, num_classes=0
            )
    except Exception as error:  # the hub client raises errors of several libraries
        problem = f"cannot get the weights of {name}: {first_line(error)}"
        advice = f"without network give a file: --backbone {name}:FILE.safetensors"
        raise FczooError(f"{problem}; {advice}") from error


@contextmanager
def _use_cache_if_offline(asked: bool) -> Iterator[None]:
    """Use only the cache while the hub is unreachable, as repeated tries take a minute."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or (asked and not _reachable(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _reachable(address: str) -> bool:
    """Return whether a server accepts connections; True behind a proxy.

    Behind a proxy only a request to the server would show it.
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
def _quiet(*loggers: str) -> Iterator[None]:
    """Show only errors of these loggers inside the context."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
