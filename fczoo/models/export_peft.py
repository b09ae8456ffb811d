"""Export of LoRA pairs in the format of peft."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from fczoo.backbones.names import BUNDLED_NAME, registered_backbone
from fczoo.backbones.timm_vit import timm_names
from fczoo.backbones.weights import split_stored_spec
from fczoo.core.files import write_json, write_safely
from fczoo.core.tree import Tree
from fczoo.models.classifier import Classifier
from fczoo.models.export_checks import (
    check_images,
    check_logits,
    export_metadata,
    float_model,
    refuse_export,
)
from fczoo.models.export_timm import LinearForm, TimmArguments, timm_form

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # file names of peft
PREFIX = "base_model.model."  # prefix of all tensors in a peft adapter


def export_peft(model: Classifier, path: Path) -> str:
    """Export LoRA pairs and head as a peft adapter of timm's model.

    Args:
        model: Kept model on the CPU.
        path: Folder to create.

    Returns:
        Python code that loads the adapter.

    Raises:
        FczooError: The method has other plugs or no LoRA pairs, or timm's model has other layers.
    """
    from timm.models.vision_transformer import VisionTransformer

    arguments, form = timm_form(model, "peft")
    if not all(name.startswith("lora.") for name in form.plugs):
        refuse_export(model, "peft", "it trains weights of the backbone itself")
    if not form.plugs:
        refuse_export(model, "peft", "it has no LoRA pairs")
    network = arguments.create()
    if not isinstance(network, VisionTransformer):
        refuse_export(model, "peft", f"timm's {arguments.name} is not a VisionTransformer")
    pairs = layer_pairs(form, model.backbone.token_dim)
    names = [name for name in network.state_dict() if not name.startswith("head.")]
    weights = timm_names({k: v.float() for k, v in model.backbone.weights.items()}, names)
    if not _is_hub(model) and weights.keys() != model.backbone.weights.keys():
        refuse_export(model, "peft", f"timm's {arguments.name} has other names for some weights")
    head = {"head.weight": form.weight.float(), "head.bias": form.bias.float()}
    updates = {f"{layer}.weight": up @ down for layer, (down, up) in pairs.items()}
    network.load_state_dict(
        {k: v + updates[k] if k in updates else v for k, v in {**weights, **head}.items()}
    )
    images = check_images(model)
    with torch.no_grad():
        check_logits(model, "peft", network(images), float_model(model)(images))
    tensors: Tree = {f"{PREFIX}{name}": value.contiguous() for name, value in head.items()}
    for layer, (down, up) in pairs.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = down.contiguous()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = up.contiguous()
    path.mkdir()
    write_safely(path / WEIGHTS, save(tensors, {"format": "pt", **export_metadata(model)}))
    write_json(path / CONFIG, _config(model, pairs))
    return f"{_base(model, arguments)}\nmodel = peft.PeftModel.from_pretrained(base, {str(path)!r})"


def layer_pairs(form: LinearForm, width: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return LoRA pairs A [r, in] and B [out, r] of one rank r by layer, with q, k, v as one layer.

    The pairs of q, k and v become one pair: their A are stacked, and each B has its own rows and
    columns. Pairs of a lower rank are padded with zeros.

    Args:
        form: Plain form of a model.
        width: Number of rows D of q, k and v each.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for (block, part), (down, up) in form.lora_pairs().items():
        if part in "qkv":
            layer, first = f"blocks.{block}.attn.qkv", "qkv".index(part) * width
            up = F.pad(up, (0, 0, first, 2 * width - first))
            if layer in pairs:
                down, up = torch.cat([pairs[layer][0], down]), torch.cat([pairs[layer][1], up], 1)
        else:
            layer = f"blocks.{block}.{'attn' if part == 'proj' else 'mlp'}.{part}"
        pairs[layer] = down, up
    rank = max(len(down) for down, _ in pairs.values())
    return {
        layer: (
            F.pad(down, (0, 0, 0, rank - len(down))).float(),
            F.pad(up, (0, rank - len(down))).float(),
        )
        for layer, (down, up) in pairs.items()
    }


def _config(model: Classifier, pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return peft's configuration; with alpha = r the update is B A."""
    rank = len(next(iter(pairs.values()))[0])
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": f"timm/{model.backbone.config.name}" if _is_hub(model) else None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(pairs),
        "modules_to_save": ["head"],
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _is_hub(model: Classifier) -> bool:
    """Return whether timm can load the backbone's weights by name."""
    name, path = split_stored_spec(str(model.record.settings.get("backbone")))
    return path is None and name != BUNDLED_NAME and registered_backbone(name) is None


def _base(model: Classifier, arguments: TimmArguments) -> str:
    """Return Python code that creates timm's model with the frozen weights."""
    if _is_hub(model):
        return f"base = {arguments.code(pretrained=True)}"
    spec, size = str(model.record.settings.get("backbone")), model.backbone.config.image_size
    return (
        f"base = {arguments.code()}\n"
        f"weights = fczoo.load_backbone({spec!r}, image_size={size}).weights\n"
        "base.load_state_dict(weights, strict=False)"
    )
