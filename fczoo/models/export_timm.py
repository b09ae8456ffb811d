"""Export of stored models to timm: a vision transformer with a linear head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fczoo.backbones.timm_vit import POOLS, timm_model, timm_names, vit_config
from fczoo.core.backbone import Backbone
from fczoo.core.files import write_safely
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig
from fczoo.models.classifier import Classifier, prediction_batch
from fczoo.models.export_checks import (
    ExportFormat,
    check_images,
    check_logits,
    export_metadata,
    float_model,
    refuse_export,
)

PLUG_KINDS = {
    "prefix": "it puts trained prefixes in front of keys and values",
    "tokens": "it puts trained prompts in front of the image's tokens",
    "deep": "it puts trained prompts between the image's tokens",
    "adapter": "it trains adapters next to the MLPs",
}
"""Use of a plug by a method, for kinds of plugs that cannot be merged into weights."""

ROWS = 64  # feature vectors per prediction


class NotLinearError(Exception):
    """Error with the reason why a model has no plain form."""


@dataclass(frozen=True)
class LinearForm:
    """Plain form of a model: plugs of the backbone, and a head with logits = features W^T + b."""

    plugs: Tree  # ``full.{weight}`` and ``lora.{block}.{part}`` pairs, float64
    weight: Tensor  # W [C, D], float64
    bias: Tensor  # b [C], float64; minus infinity for classes that are never predicted

    def merged_weights(self, backbone: Backbone) -> Tree:
        """Return the weights of the backbone, in float32, with all plugs merged into them.

        Args:
            backbone: The frozen backbone.
        """
        weights = {
            name: self.plugs.get(f"full.{name}", value) for name, value in backbone.weights.items()
        }
        for (block, part), (down, up) in self.lora_pairs().items():
            layer = "mlp" if part in ("fc1", "fc2") else "attn"
            name = f"blocks.{block}.{layer}.{'qkv' if part in 'qkv' else part}.weight"
            rows = slice(None)
            if part in "qkv":
                rows = slice("qkv".index(part) * len(up), ("qkv".index(part) + 1) * len(up))
            weights[name] = weights[name].double().clone()
            weights[name][rows] += up @ down
        return {name: value.float() for name, value in weights.items()}

    def lora_pairs(self) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """Return the LoRA pairs A [r, in] and B [out, r] by block and part, in order of blocks."""
        layers = sorted({tuple(name.split(".")[1:3]) for name in self.plugs if name[0] == "l"})
        return {
            (int(block), part): (
                self.plugs[f"lora.{block}.{part}.a"],
                self.plugs[f"lora.{block}.{part}.b"],
            )
            for block, part in layers
        }


class _FeatureProbe(Backbone):
    """Backbone that returns given features and records the plugs of each call."""

    def __init__(self, backbone: Backbone, features: Tensor):
        super().__init__(backbone.config, backbone.weights, backbone.sha256, copy=False)
        self.given_features, self.calls = features, list[Tree]()

    def _forward(
        self, images: Tensor, plugs: Mapping[str, Tensor], pool: Any, tap_values: dict[str, Tensor]
    ) -> Tensor:
        self.check_plugs(plugs)
        if tap_values:
            raise NotLinearError("it reads tokens of inner blocks of the backbone")
        if pool != "cls":
            raise NotLinearError("it classifies the outputs of prompts")
        self.calls.append(dict(plugs))
        return self.given_features


@torch.no_grad()
def linear_form(model: Classifier) -> LinearForm:
    """Return the plain form of a model.

    The method predicts from chosen features: zero gives the bias, unit vectors the weights, and
    random features check linearity. Thus methods with a linear prediction need no declaration.

    Args:
        model: Stored model on the CPU.

    Raises:
        NotLinearError: The method uses plugs that are not parts of weights, or its prediction is
            not linear in the features.
    """
    dim = model.backbone.dim
    random = torch.randn(4, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero, unit = torch.zeros(1, dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)
    state = {k: v.double() if v.is_floating_point() else v for k, v in model.state.items()}
    parts = []
    for features in torch.cat([zero, random, unit]).split(ROWS):
        probe = _FeatureProbe(model.backbone, features)
        images = torch.zeros(len(features), 3, 1, 1, dtype=torch.float64)
        batch = prediction_batch(model.method.training().inputs, probe, images)
        parts.append(model.method.predict(probe, state, batch, model.task).double())
    plugs = _weight_plugs(probe.calls)
    scores = torch.cat(parts)
    weight, bias = (scores[5:] - scores[0]).mT, scores[0]
    has_images = model.get_buffer("has_images")
    expected, actual = random @ weight.mT + bias, scores[1:5]
    if not torch.allclose(expected[:, has_images], actual[:, has_images], rtol=1e-6, atol=1e-6):
        raise NotLinearError(
            "its logits are not linear in the features"
            if model.method.training().gives_logits
            else "it predicts by scores, such as distances to class means, and not by a linear head"
        )
    if len(probe.calls) != 1:
        raise NotLinearError("it needs more than one forward pass of the backbone")
    weight = weight.masked_fill(~has_images[:, None], 0)
    return LinearForm(plugs, weight, bias.masked_fill(~has_images, -torch.inf))


def _weight_plugs(calls: list[Tree]) -> Tree:
    """Return the plugs of all calls of the backbone.

    Raises NotLinearError for a plug that cannot be merged into weights.
    """
    plugs: Tree = {}
    for call in calls:
        plugs |= call
    for name, value in plugs.items():
        kind = name.partition(".")[0]
        if kind in PLUG_KINDS:
            raise NotLinearError(PLUG_KINDS[kind])
        if kind == "lora" and value.ndim > 2:
            raise NotLinearError("its LoRA pairs depend on the image")
    return plugs


PLAIN_VIT = "vit_tiny_patch16_224"  # timm's architecture for backbones that timm does not have


@dataclass(frozen=True)
class TimmArguments:
    """Arguments of ``timm.create_model`` for a backbone with a classification head."""

    name: str
    values: dict[str, Any]  # all arguments except the name

    def create(self) -> nn.Module:
        """Create the model with random weights, in evaluation mode."""
        import timm

        model: nn.Module = timm.create_model(self.name, **self.values)
        return model.eval()

    def code(self, **extra_arguments: Any) -> str:
        """Return the call as Python code.

        Args:
            **extra_arguments: Further arguments.
        """
        values = ", ".join(
            f"{name}={value!r}" for name, value in {**self.values, **extra_arguments}.items()
        )
        return f"timm.create_model({self.name!r}, {values})"


def timm_arguments(config: ViTConfig, classes: int) -> TimmArguments | None:
    """Return the arguments with which timm creates a backbone with a head; None if it cannot.

    Args:
        config: Configuration of the backbone.
        classes: Number of classes of the head.
    """
    import timm
    from timm.models.eva import Eva

    name, norm_option = PLAIN_VIT, "fc_norm"
    values: dict[str, Any] = {"num_classes": classes}
    if timm.models.is_model(config.name.split(".")[0]):
        with torch.device("meta"):
            network = timm_model(config.name, pretrained=False)
        name, native_config = config.name, vit_config(config.name, network)
        norm_option = "use_fc_norm" if isinstance(network, Eva) else "fc_norm"
        if config.image_size != native_config.image_size:
            values["img_size"] = config.image_size
    else:
        native_config = replace(config, pool="cls", norm_after_pool=False)
        values |= {
            "img_size": config.image_size,
            "patch_size": config.patch_size,
            "embed_dim": config.dim,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": config.mlp_dim / config.dim,
        }
    if config.pool != native_config.pool:
        words = {pool: word for word, pool in POOLS.items()}
        if config.pool not in words:
            return None
        values |= {"global_pool": words[config.pool], norm_option: config.norm_after_pool}
    arguments = TimmArguments(name, values)
    with torch.device("meta"):
        created_config = vit_config(config.name, arguments.create())
    is_same = replace(created_config, mean=config.mean, std=config.std) == config
    return arguments if is_same else None


def timm_form(model: Classifier, style: ExportFormat) -> tuple[TimmArguments, LinearForm]:
    """Return timm's arguments and the plain form of a model.

    Args:
        model: Stored model on the CPU.
        style: Format, for errors.

    Raises:
        FczooError: The model has no plain form, or timm does not have the architecture.
    """
    try:
        form = linear_form(model)
    except NotLinearError as error:
        refuse_export(model, style, str(error))
    config = model.backbone.config
    arguments = timm_arguments(config, len(model.classes))
    if arguments is None:
        refuse_export(
            model, style, f"timm has no architecture like {config.name} with pool {config.pool}"
        )
    return arguments, form


def export_timm(model: Classifier, path: Path) -> str:
    """Export the backbone with all trained weights merged into it, and the head.

    Args:
        model: Kept model on the CPU.
        path: File of safetensors.

    Returns:
        Python code that loads the file.

    Raises:
        FczooError: The model has no plain form, or timm does not have the architecture.
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
    write_safely(path, save(tensors, {"format": "pt", **export_metadata(model)}))
    return arguments.code(checkpoint_path=str(path))
