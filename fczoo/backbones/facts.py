"""Facts about a backbone: size, work per image, licence and what timm knows of its weights."""

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fczoo.backbones.load import configuration
from fczoo.backbones.names import BUNDLED_NAME, full_name
from fczoo.backbones.weights import describe_head, split_spec
from fczoo.core.backbone import Backbone
from fczoo.core.vit_config import ViTConfig

BUNDLED_LICENCE = "Apache-2.0; trained on images of ImageNet, for research use"


class BackboneFacts(NamedTuple):
    """Facts about a backbone; empty texts and 0 for what is not known."""

    config: ViTConfig
    parameters: int
    flops: int  # floating-point operations per image, two per multiplication with addition
    licence: str
    dropped: str  # head of the checkpoint that is not loaded
    note: str


def backbone_facts(spec: str, image_size: int | None = None) -> BackboneFacts:
    """Collect facts about a backbone; its weights need not be on this machine.

    Args:
        spec: Name, file, or both, as for ``load_backbone``.
        image_size: Height and width of the input in pixels. Default: that of the checkpoint.

    Raises:
        FczooError: As for ``load_backbone``.
    """
    config = configuration(spec, image_size)
    weights = {k: torch.empty(shape, device="meta") for k, shape in config.shapes().items()}
    counter = FlopCounterMode(display=False)
    with counter:
        side = config.image_size
        Backbone(config, weights, copy=False)(torch.empty(1, 3, side, side, device="meta"))
    name, path = split_spec(spec)
    entry = _timm_entry(name) if path is None else None
    return BackboneFacts(
        config,
        sum(weight.numel() for weight in weights.values()),
        counter.get_total_flops(),
        BUNDLED_LICENCE if spec == BUNDLED_NAME else _licence(entry),
        describe_head(full_name(name), int(getattr(entry, "num_classes", 0) or 0)),
        _text(entry, "notes"),
    )


def _timm_entry(name: str) -> Any:
    """Return what timm knows about weights; None for the bundled backbone."""
    import timm

    architecture = name.partition(".")[0]
    known = timm.models.is_model(architecture)
    return timm.models.get_pretrained_cfg(full_name(name)) if known else None


def _licence(entry: Any) -> str:
    licence = _text(entry, "license")
    return f"{licence}, as timm states it" if licence else ""


def _text(entry: Any, field: str) -> str:
    value = getattr(entry, field, None) or ""
    return value if isinstance(value, str) else "; ".join(map(str, value))
