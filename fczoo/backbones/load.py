"""Loading of backbones: the bundled one, a local file, or weights from timm's hub."""

import hashlib
import logging
import math
import re
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fczoo.backbones.names import BUNDLED_NAME, full_name, registered_backbone
from fczoo.backbones.state_dict import UNUSED_PREFIXES, dropped_tensors, read_state_dict
from fczoo.backbones.timm_vit import (
    BUNDLED_CONFIG,
    architecture,
    common_names,
    from_timm,
    input_statistics,
    timm_model,
)
from fczoo.backbones.weights import describe_head, split_spec
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line, use_python_names
from fczoo.core.vit_config import Pool, ViTConfig

log = logging.getLogger("fczoo")

RELEASES = re.compile(
    r"(dino_(deit|vit)|deit_|mae_|mocov3|moco_v3|vit-[sb]-\d+ep|ibot_)", re.IGNORECASE
)
"""File names of official releases whose inputs have ImageNet's mean and standard deviation."""
IMAGENET: Any = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# width -> size in timm's names; all have 64 channels per head
_WIDTHS = {
    192: "tiny",
    384: "small",
    768: "base",
    1024: "large",
}
BUNDLED_LICENCE = "Apache-2.0; trained on images of ImageNet, for research use"


@use_python_names
def load_backbone(
    spec: str,
    *,
    image_size: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    pool: Pool | None = None,
    device: str | torch.device | None = None,
) -> Backbone:
    """Load a frozen backbone: ``vit_nano_32``, a name of a plug-in or timm, a file, or NAME:FILE.

    A file needs no name if its file name or the shapes of its tensors determine the architecture.
    Another ``image_size`` resamples the position embedding.

    Args:
        spec: Name, file, or both.
        image_size: Height and width of the input in pixels. Default: that of the checkpoint.
        mean: Mean of the three input channels. Default: that of the checkpoint.
        std: Standard deviation of the three input channels. Default: that of the checkpoint.
        pool: Pooling of the output tokens: ``cls``, ``mean`` or ``cls+mean``. Default: that of
            the checkpoint.
        device: Device of the weights. Default: the CPU.

    Returns:
        The backbone, with its configuration, weights and their SHA-256.

    Raises:
        FczooError: The name is unknown, the file is missing or damaged, the model is not a plain
            ViT, or the device is not available.
    """
    name, path = split_spec(spec)
    if path is None and name == BUNDLED_CONFIG.name:
        with as_file(files("fczoo") / "assets" / "vit_nano_32.safetensors") as file:
            config, weights, digest = BUNDLED_CONFIG, _read(file, name), _sha256(file)
    elif path is None:
        entry = registered_backbone(name)
        config, weights = _from_plugin(entry) if entry else from_timm(name)
        digest = _sha256_tensors(weights)
    else:
        weights, digest = common_names(_read(path, name)), _sha256(path)
        config = _config(name, path, weights)
    weights = {k: v.float() for k, v in weights.items() if not k.startswith(UNUSED_PREFIXES)}
    if broken := next((k for k, v in weights.items() if not v.isfinite().all()), None):
        raise FczooError(f"weight {broken} of {spec} is not finite; get the file again")
    if image_size is not None and image_size != config.image_size:
        config, weights = _resize_input(config, weights, image_size)
    config = _replace(config, mean=mean, std=std).with_pool(pool)
    if config.pool != "attention":
        weights = {k: v for k, v in weights.items() if not k.startswith("attn_pool.")}
    if len(config.mean) != 3 or len(config.std) != 3 or min(config.std) <= 0:
        problem = f"input mean {config.mean} and std {config.std}"
        raise FczooError(f"{problem} must be three numbers each, and std above 0")
    backbone = Backbone(config, weights, digest)
    return backbone if device is None else _move_to_device(backbone, device)


def configuration(spec: str, image_size: int | None = None, pool: Pool | None = None) -> ViTConfig:
    """Return the configuration of a backbone without its weights.

    A file is read only if the spec has no name.

    Args:
        spec: Name, file, or both, as for ``load_backbone``.
        image_size: Height and width of the input in pixels. Default: that of the checkpoint.
        pool: Pooling of the output tokens. Default: that of the checkpoint.

    Raises:
        FczooError: As for ``load_backbone``.
    """
    name, path = split_spec(spec)
    config = (
        architecture(name)
        if name or path is None
        else _config("", path, common_names(_read(path, name)))
    )
    return (config if image_size is None else _with_image_size(config, image_size)).with_pool(pool)


def _from_plugin(entry: Any) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Return configuration and weights of a backbone that a plug-in registers."""
    config, place = architecture(entry.name), f"backbone {entry.name} in {entry.__module__}"
    try:
        weights = dict(entry().weights())
    except FczooError:
        raise
    except Exception as error:  # whatever its reading of a file raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise FczooError(f"the weights of {place} cannot be read: {reason}") from error
    if wrong := next((k for k, v in weights.items() if not isinstance(v, Tensor)), None):
        raise FczooError(f"weight {wrong} of {place} is not a tensor; return torch tensors")
    return config, weights


def _read(path: Path, name: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise FczooError(f"no weight file at {path}; give --backbone NAME, FILE or NAME:FILE")
    try:
        return _read_flax(path, name) if path.suffix == ".npz" else read_state_dict(path)
    except FczooError:
        raise
    except OSError as error:
        raise FczooError(f"cannot read weights from {path}: {error.strerror or error}") from error
    except (SafetensorError, RuntimeError, ValueError, KeyError, EOFError, AttributeError) as error:
        problem = f"cannot read weights from {path}: {type(error).__name__} {first_line(error)}"
        raise FczooError(f"{problem}; check that the file is complete") from error
    except Exception as error:  # errors of zip files do not share a base class with the above
        raise FczooError(f"{path} is not a valid weight file: {first_line(error)}") from error


def _read_flax(path: Path, name: str) -> dict[str, Tensor]:
    """Read a Flax checkpoint of the original ViT release, which names its tensors differently.

    Raises:
        FczooError: Neither the name nor the file name is that of a timm model.
    """
    import timm

    if not (name or timm.models.is_model(path.stem.split(".")[0])):
        problem = (
            f"the architecture of {path} is unknown: the file name is not that of a timm model"
        )
        raise FczooError(f"{problem}; give --backbone NAME:{path.name} with a timm name")
    model: Any = timm_model(name or path.stem, pretrained=False)
    model.load_pretrained(str(path))
    return dict(model.state_dict())


def _config(name: str, path: Path, weights: dict[str, Tensor]) -> ViTConfig:
    """Return the architecture by the given name, else by the file name or the tensors' shapes."""
    import timm

    if name:
        config = architecture(name)
        return (
            replace(config, **IMAGENET) if "." not in name and RELEASES.match(path.name) else config
        )
    try:
        dim = weights["cls_token"].shape[-1]
        patch = weights["patch_embed.proj.weight"].shape[-1]
        size = math.isqrt(weights["pos_embed"].shape[1] - 1) * patch
        depth = len({k.split(".")[1] for k in weights if k.startswith("blocks.")})
        mlp = weights["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        problem = f"the architecture cannot be derived from the tensors of {path} ({error})"
        raise FczooError(f"{problem}; give NAME:FILE with a timm name") from error
    if path.stem in timm.list_pretrained():
        timm_entry = architecture(path.stem)
        shapes = {k: tuple(v.shape) for k, v in weights.items()}
        if timm_entry.shapes() == shapes:
            return timm_entry
    if (dim, patch, size, depth) == (
        BUNDLED_CONFIG.dim,
        BUNDLED_CONFIG.patch_size,
        BUNDLED_CONFIG.image_size,
        BUNDLED_CONFIG.depth,
    ):
        return BUNDLED_CONFIG
    if dim not in _WIDTHS:
        problem = f"the number of heads cannot be derived from {path} (width {dim})"
        raise FczooError(f"{problem}; give NAME:FILE with a timm name")
    guess = f"vit_{_WIDTHS[dim]}_patch{patch}_{size}"
    if RELEASES.match(path.name):
        return ViTConfig(guess, size, patch, dim, depth, dim // 64, mlp, **IMAGENET)
    mean, std = input_statistics(guess)
    message = "%s: its shapes are those of %s, which is assumed, with input mean %s and std %s; %s"
    log.warning(message, path.name, guess, mean, std, "if this is wrong, give NAME:FILE")
    return ViTConfig(guess, size, patch, dim, depth, dim // 64, mlp, mean=mean, std=std)


def _resize_input(
    config: ViTConfig, weights: dict[str, Tensor], image_size: int
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Return the configuration and weights for another input size in pixels.

    The position embedding is resampled.
    """
    from timm.layers.pos_embed import resample_abs_pos_embed

    new_config = _with_image_size(config, image_size)
    if config.position == "none":
        return new_config, weights
    prefix = config.prefix_tokens if config.position == "all" else 0
    side = new_config.grid
    pos = resample_abs_pos_embed(weights["pos_embed"], [side, side], num_prefix_tokens=prefix)
    return new_config, {**weights, "pos_embed": pos}


def _with_image_size(config: ViTConfig, image_size: int) -> ViTConfig:
    """Return the configuration for another input size in pixels.

    Raises:
        FczooError: The size is not a multiple of the patch size.
    """
    if image_size < 1 or image_size % config.patch_size:
        problem = f"image size {image_size} is not a multiple of the patch size of {config.name}"
        raise FczooError(f"{problem}; give a multiple of {config.patch_size}")
    return _replace(config, image_size=image_size)


def _replace(config: ViTConfig, **changes: Any) -> ViTConfig:
    return replace(config, **{k: v for k, v in changes.items() if v is not None})


def _move_to_device(backbone: Backbone, device: str | torch.device) -> Backbone:
    try:
        return backbone.to(torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:
        problem = f"device {str(device)!r} cannot be used: {first_line(error)}"
        advice = "give 'cpu', or 'cuda' or 'mps' if this machine has it"
        raise FczooError(f"{problem}; {advice}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_tensors(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class BackboneFacts(NamedTuple):
    """Facts about a backbone; unknown facts are empty texts or 0."""

    config: ViTConfig
    parameters: int
    flops: int  # floating-point operations per image, two per multiplication with addition
    licence: str
    dropped: str  # head and other tensors of the checkpoint that are not loaded
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
    head = describe_head(full_name(name), int(getattr(entry, "num_classes", 0) or 0))
    dropped = f"the checkpoint's {head}" if head else ""
    if path is not None and path.is_file() and path.suffix != ".npz":
        load_backbone(spec, image_size=image_size)  # refuses a file of another architecture
        dropped = dropped_tensors(path)
    return BackboneFacts(
        config,
        sum(weight.numel() for weight in weights.values()),
        counter.get_total_flops(),
        BUNDLED_LICENCE if spec == BUNDLED_NAME else _licence(name, entry),
        dropped,
        _text(entry, "notes"),
    )


def _timm_entry(name: str) -> Any:
    """Return timm's entry about weights; None if timm has no such model."""
    import timm

    architecture = name.partition(".")[0]
    has_entry = timm.models.is_model(architecture)
    return timm.models.get_pretrained_cfg(full_name(name)) if has_entry else None


def _licence(name: str, entry: Any) -> str:
    if plugin := registered_backbone(name):
        return str(getattr(plugin, "licence", ""))
    licence = _text(entry, "license")
    return f"{licence}, as timm states it" if licence else ""


def _text(entry: Any, field: str) -> str:
    value = getattr(entry, field, None) or ""
    return value if isinstance(value, str) else "; ".join(map(str, value))
