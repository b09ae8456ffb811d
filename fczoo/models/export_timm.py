"""Export of kept models to timm: weights that ``timm.create_model`` loads."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from fczoo.backbones.timm_vit import POOLS, timm_model, timm_names, vit_config
from fczoo.core.files import write_safely
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig
from fczoo.models.classifier import Classifier
from fczoo.models.export_checks import (
    ExportFormat,
    check_images,
    check_logits,
    facts,
    float_model,
    refuse_export,
)
from fczoo.models.linear_form import LinearForm, NotLinearError, linear_form

PLAIN = "vit_tiny_patch16_224"  # architecture whose sizes are arguments of backbones without name


@dataclass(frozen=True)
class TimmArguments:
    """Arguments of ``timm.create_model`` for a backbone with a classification head."""

    name: str
    values: dict[str, Any]  # beside the name

    def create(self) -> nn.Module:
        """Return the model with random weights, in evaluation mode."""
        import timm

        model: nn.Module = timm.create_model(self.name, **self.values)
        return model.eval()

    def code(self, **more: Any) -> str:
        """Return the call in Python.

        Args:
            **more: Further arguments.
        """
        values = ", ".join(f"{name}={value!r}" for name, value in {**self.values, **more}.items())
        return f"timm.create_model({self.name!r}, {values})"


def timm_arguments(config: ViTConfig, classes: int) -> TimmArguments | None:
    """Return the arguments that make timm create a backbone with a head; None if it cannot.

    Args:
        config: Configuration of the backbone.
        classes: Number of classes of the head.
    """
    import timm
    from timm.models.eva import Eva

    name, norm_option = PLAIN, "fc_norm"
    values: dict[str, Any] = {"num_classes": classes}
    if timm.models.is_model(config.name.split(".")[0]):
        with torch.device("meta"):
            network = timm_model(config.name, pretrained=False)
        name, native = config.name, vit_config(config.name, network)
        norm_option = "use_fc_norm" if isinstance(network, Eva) else "fc_norm"
        if config.image_size != native.image_size:
            values["img_size"] = config.image_size
    else:
        native = replace(config, pool="cls", norm_after_pool=False)
        values |= {
            "img_size": config.image_size,
            "patch_size": config.patch_size,
            "embed_dim": config.dim,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": config.mlp_dim / config.dim,
        }
    if config.pool != native.pool:
        words = {pool: word for word, pool in POOLS.items()}
        if config.pool not in words:
            return None
        values |= {"global_pool": words[config.pool], norm_option: config.norm_after_pool}
    arguments = TimmArguments(name, values)
    with torch.device("meta"):
        created = vit_config(config.name, arguments.create())
    same = replace(created, mean=config.mean, std=config.std) == config
    return arguments if same else None


def timm_form(model: Classifier, style: ExportFormat) -> tuple[TimmArguments, LinearForm]:
    """Return a model as arguments of timm, plugs and head.

    Args:
        model: Kept model on the CPU.
        style: Format, for errors.

    Raises:
        FczooError: The method has no such form, or timm no such architecture.
    """
    try:
        form = linear_form(model)
    except NotLinearError as error:
        refuse_export(model, style, str(error))
    config = model.backbone.config
    arguments = timm_arguments(config, len(model.classes))
    if arguments is None:
        refuse_export(model, style, f"timm has no {config.name} that pools by {config.pool}")
    return arguments, form


def export_timm(model: Classifier, path: Path) -> str:
    """Export the backbone with all trained weights merged into it, and the head.

    Args:
        model: Kept model on the CPU.
        path: File of safetensors.

    Returns:
        Python code that loads the file.

    Raises:
        FczooError: The method has no such form, or timm no such architecture.
    """
    arguments, form = timm_form(model, "timm")
    network = arguments.create()
    names = [name for name in network.state_dict() if not name.startswith("head.")]
    weights = timm_names(form.merged_weights(model.backbone), names)
    weights |= {"head.weight": form.weight.float(), "head.bias": form.bias.float()}
    network.load_state_dict(weights)
    images = check_images(model)
    with torch.no_grad():
        check_logits(model, "timm", network(images), float_model(model)(images))
    tensors: Tree = {name: value.contiguous() for name, value in weights.items()}
    write_safely(path, save(tensors, {"format": "pt", **facts(model)}))
    return arguments.code(checkpoint_path=str(path))
