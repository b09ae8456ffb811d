"""Where backbones come from: the bundled one, a local file, or timm's hub."""

import hashlib
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .backbone import Backbone, ViTConfig
from .errors import FczooError, first_line
from .options import nearest

BUNDLED = ViTConfig("vit_nano_32", image_size=32, patch_size=4, dim=128, depth=6, heads=4, mlp_dim=512)
"""Pre-trained on Tiny-ImageNet by benchmarks/pretrain_vit_nano.py; weights ship with the package."""

log = logging.getLogger("fczoo")

SUFFIXES = (".safetensors", ".npz", ".pth", ".bin")
_PLAIN = re.compile(r"vit_(tiny|small|base|large)_patch(8|16|32)_(224|384)\.(augreg|augreg_.*|dino|mae|orig_.*|sam_.*)")
_WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large"}  # timm's ViT family: 64 channels a head


def load_backbone(
    spec: str,
    *,
    image_size: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Backbone:
    """Frozen backbone from ``vit_nano_32``, a timm ViT name, a weight file, or ``NAME:FILE``.

    The file alone suffices where the architecture follows from its name or its tensors' shapes. Input size, mean and
    std come from the checkpoint's own configuration unless given; another ``image_size`` resamples the position
    embedding. Raises FczooError for unknown names, missing or corrupt files, and models that are no plain ViT.
    """
    name, path = _split(spec)
    if path is None and name == BUNDLED.name:
        with as_file(files("fczoo") / "assets" / "vit_nano_32.safetensors") as bundled:
            config, weights, digest = BUNDLED, _read(bundled, name), _sha256(bundled)
    elif path is None:
        config, weights = _from_timm(name)
        digest = _sha256_tensors(weights)
    else:
        weights, digest = _read(path, name), _sha256(path)
        config = _config(name, path, weights)
    weights = {k: v.float() for k, v in weights.items() if not k.startswith(("head.", "head_dist.", "pre_logits."))}
    if broken := next((k for k, v in weights.items() if not v.isfinite().all()), None):
        raise FczooError(f"weight {broken} of {spec} is not finite; get the file anew")
    if image_size is not None and image_size != config.image_size:
        config, weights = _resized(config, weights, image_size)
    config = _replace(config, mean=mean, std=std)
    if len(config.mean) != 3 or len(config.std) != 3 or min(config.std) <= 0:
        raise FczooError(f"input mean {config.mean} and std {config.std} must be three numbers each, and std above 0")
    return Backbone(config, weights, digest)


def weights_needed(spec: str) -> str:
    """How to get the weights of ``spec``, in words; empty where they are at hand."""
    name, path = _split(spec)
    if path is not None:
        return "" if path.is_file() else f"there is no weight file at {path} either"
    if name == BUNDLED.name:
        return ""
    return f"its backbone {name} comes from timm's hub as the run starts, or from a file: --backbone {name}:FILE.safetensors"


def architecture(name: str) -> ViTConfig:
    """Configuration of a named backbone, without its weights."""
    return BUNDLED if name == BUNDLED.name else _timm_config(name, _timm_model(name, pretrained=False))


def backbone_names() -> list[str]:
    """The bundled backbone and timm's plain ViTs with published weights."""
    import timm

    return [BUNDLED.name, *(n for n in timm.list_pretrained("vit_*") if _PLAIN.fullmatch(n))]


def _split(spec: str) -> tuple[str, Path | None]:
    name, colon, file = spec.partition(":")
    if colon and (file.endswith(SUFFIXES) or "/" in file):
        return name, Path(file).expanduser()
    if spec.endswith(SUFFIXES) or "/" in spec:
        return "", Path(spec).expanduser()
    return spec, None


def _read(path: Path, name: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise FczooError(f"no weight file at {path}; give --backbone NAME, FILE or NAME:FILE")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        import timm

        if path.suffix == ".npz":  # Flax checkpoints of the original ViT release name their tensors otherwise
            if not (name or timm.models.is_model(path.stem.split(".")[0])):
                raise FczooError(f"the name of {path} is no timm model's, and .npz files do not name one; give --backbone NAME:{path.name}")
            model: Any = _timm_model(name or path.stem, pretrained=False)
            model.load_pretrained(str(path))
            return dict(model.state_dict())
        return dict(timm.models.load_state_dict(str(path), weights_only=True))
    except FczooError:
        raise
    except (SafetensorError, RuntimeError, ValueError, OSError, KeyError, EOFError, AttributeError) as error:
        raise FczooError(f"cannot read weights from {path}: {first_line(error)}; check that the file is complete") from error
    except Exception as error:  # unpickling errors of torch.load share no base class
        raise FczooError(f"{path} is no plain weight file: {first_line(error)}") from error


def _config(name: str, path: Path, weights: dict[str, Tensor]) -> ViTConfig:
    """Architecture by the given name, else by the file's own name, else by the tensors' shapes."""
    import timm

    if name:
        return architecture(name)
    try:
        dim = weights["cls_token"].shape[-1]
        patch = weights["patch_embed.proj.weight"].shape[-1]
        size = math.isqrt(weights["pos_embed"].shape[1] - 1) * patch
        depth = len({k.split(".")[1] for k in weights if k.startswith("blocks.")})
        mlp = weights["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise FczooError(f"{path} does not hold a plain ViT in timm's names ({error}); give NAME:FILE for another layout") from error
    if path.stem in timm.list_pretrained():
        found = _timm_config(path.stem, _timm_model(path.stem, pretrained=False))
        if (found.dim, found.depth, found.patch_size, found.image_size) == (dim, depth, patch, size):
            return found
    if (dim, patch, size, depth) == (BUNDLED.dim, BUNDLED.patch_size, BUNDLED.image_size, BUNDLED.depth):
        return BUNDLED
    if dim not in _WIDTHS:
        raise FczooError(f"the number of heads cannot be told from {path} (width {dim}); give NAME:FILE with a timm name")
    guess = f"vit_{_WIDTHS[dim]}_patch{patch}_{size}"
    mean, std = _input_statistics(guess)
    log.warning("%s is taken for %s by its shapes, with input mean %s and std %s; else give NAME:FILE", path.name, guess, mean, std)
    return ViTConfig(guess, size, patch, dim, depth, dim // 64, mlp, mean=mean, std=std)


def _input_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    import timm

    known = timm.models.get_pretrained_cfg(name, allow_unregistered=True) if timm.models.is_model(name) else None
    return (tuple(known.mean), tuple(known.std)) if known else ((0.5,) * 3, (0.5,) * 3)


def _from_timm(name: str) -> tuple[ViTConfig, dict[str, Tensor]]:
    config = architecture(name)  # refuses what is no plain ViT before anything is fetched
    return config, dict(_timm_model(name, pretrained=True).state_dict())


def _timm_model(name: str, pretrained: bool) -> Any:
    import timm

    architecture = name.split(".")[0]
    if not timm.models.is_model(architecture):
        known = [BUNDLED.name, *timm.list_models("vit_*")]
        raise FczooError(f"no backbone is called {name!r}; {nearest(architecture, known)}")
    try:
        with _quiet("huggingface_hub", "timm"):  # each failed try would warn, and the error below says what is wrong
            return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # the hub client raises errors of several libraries
        raise FczooError(
            f"cannot get the weights of {name}: {first_line(error)}; without network give a file: --backbone {name}:FILE.safetensors"
        ) from error


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _timm_config(name: str, model: Any) -> ViTConfig:
    """Configuration of a timm model. Raises FczooError naming what makes it other than a plain ViT."""
    from timm.models.vision_transformer import Block, VisionTransformer

    def refuse(reason: str) -> None:
        raise FczooError(f"{name} is no plain ViT: {reason}; use a vit_*_patch*_* model with a class token")

    if type(model) is not VisionTransformer:
        refuse(f"it is a {type(model).__name__}")
    block, cfg = model.blocks[0], model.pretrained_cfg
    if type(block) is not Block or not isinstance(block.mlp.act, torch.nn.GELU) or block.mlp.act.approximate != "none":
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
        tuple(cfg["mean"]),
        tuple(cfg["std"]),
    )
    extra = {k for k in model.state_dict() if not k.startswith("head.")} ^ config.shapes().keys()
    if extra:
        refuse(f"its tensor {min(extra)} has no place in one")
    return config


def _resized(config: ViTConfig, weights: dict[str, Tensor], image_size: int) -> tuple[ViTConfig, dict[str, Tensor]]:
    from timm.layers import resample_abs_pos_embed

    if image_size < 1 or image_size % config.patch_size:
        raise FczooError(f"image size {image_size} is no multiple of the patch size {config.patch_size} of {config.name}")
    side = image_size // config.patch_size
    pos = resample_abs_pos_embed(weights["pos_embed"], [side, side], num_prefix_tokens=1)
    return _replace(config, image_size=image_size), {**weights, "pos_embed": pos}


def _replace(config: ViTConfig, **changes: Any) -> ViTConfig:
    return replace(config, **{k: v for k, v in changes.items() if v is not None})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_tensors(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
