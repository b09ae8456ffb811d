"""The user's own vision transformer with plugs as parameters of a PyTorch module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fczoo.backbones.timm_vit import common_names, vit_config
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import plural, quote
from fczoo.core.tree import Tree
from fczoo.core.vit_forward import PooledRows

PARTNERS = {"lora": "ab", "prefix": "kv", "adapter": ("down", "up", "down_bias", "up_bias")}
"""Kind of a plug -> last words of the names that occur together."""


def wrap_vit(model: nn.Module) -> Backbone:
    """Copy the weights of a timm ViT into a frozen backbone, without its classification head.

    The backbone computes what ``model.forward_head(model.forward_features(images),
    pre_logits=True)`` gives in evaluation mode.

    Args:
        model: ``timm.create_model(...)``, a ``VisionTransformer`` or ``Eva``, with any weights.

    Returns:
        The backbone, which takes plugs: see ``fczoo.core.backbone``.

    Raises:
        FczooError: The model is not a plain ViT of timm, or a weight is not finite.
    """
    kind = type(model)
    if not kind.__module__.startswith("timm."):
        raise FczooError(
            f"the model is a {kind.__module__}.{kind.__qualname__}; give a ViT of "
            "timm.create_model, or load a file of weights with load_backbone('NAME:FILE')"
        )
    about: Any = getattr(model, "pretrained_cfg", None) or {}
    config = vit_config(about.get("architecture") or kind.__name__, model)
    weights = common_names(model.state_dict())
    weights = {name: weights[name] for name in config.shapes()}
    if broken := next((k for k, v in weights.items() if not v.isfinite().all()), None):
        raise FczooError(f"weight {broken} of {config.name} is not finite; load its weights again")
    return Backbone(config, weights)


class PluggedViT(nn.Module):
    """A frozen ViT whose plugs are the module's parameters: images -> features.

    LoRA pairs, prefixes, prompts and adapters are plugs. ``fczoo.functional`` creates them, and
    ``fczoo.core.backbone`` lists their names and shapes. Only plugs are trained and saved
    (``parameters``, ``state_dict``); the frozen weights just follow the module to its device.

    Attributes:
        backbone: The frozen backbone.
    """

    backbone: Backbone

    def __init__(self, vit: Backbone | nn.Module, plugs: Mapping[str, Tensor]):
        """Create the module with copies of the plugs.

        Args:
            vit: Backbone of ``wrap_vit`` or ``load_backbone``, or a ViT of timm.
            plugs: Initial values by the names of plugs.

        Raises:
            FczooError: The model is not a plain ViT, a plug is unknown, or its shape does not fit.
        """
        super().__init__()
        backbone = vit if isinstance(vit, Backbone) else wrap_vit(vit)
        _check_plugs(backbone, plugs)
        self._config, self._sha256 = backbone.config, backbone.sha256
        self._weights = TensorBuffers(backbone.weights, persistent=False)
        self._names = tuple(plugs)
        for name, value in plugs.items():
            copy = value.detach().clone().to(backbone.device)
            self.register_parameter(flat_name(name), nn.Parameter(copy))
        self._bind()

    def forward(self, images: Tensor, pool: PooledRows = "cls") -> Tensor:
        """Compute features of images.

        Args:
            images: Normalised images [B, 3, S, S]; ``backbone.normalise`` takes pixels in [0, 1].
            pool: Output rows to pool: those of the image (``cls``), the ``tokens`` prompts
                (``prompt``), or both (``cls+prompt``).

        Returns:
            Features [B, D].

        Raises:
            FczooError: The images have another shape, or numbers that are not floating-point.
        """
        size = self._config.image_size
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise FczooError("images are not a tensor of floating-point numbers; normalise them")
        if images.ndim != 4 or images.shape[1:] != (3, size, size):
            raise FczooError(f"images have shape {list(images.shape)}; give [B, 3, {size}, {size}]")
        return self.backbone(images.to(self.backbone.dtype), self.plugs(), pool)

    def plugs(self) -> Tree:
        """Return the parameters by the names of their plugs, as an aggregator merges them."""
        return {name: self.get_parameter(flat_name(name)) for name in self._names}

    @torch.no_grad()
    def load_plugs(self, plugs: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters, such as those that ``fczoo.merge`` returns.

        Args:
            plugs: Values by the names of the plugs; all of them.

        Raises:
            FczooError: A plug is missing, unknown, or of another shape.
        """
        if differences := sorted(plugs.keys() ^ {*self._names}):
            fault = "no" if differences[0] in self._names else "an unknown"
            problem = f"load_plugs got {fault} plug {differences[0]!r}"
            raise FczooError(f"{problem}; give {', '.join(self._names)}")
        for name, parameter in self.plugs().items():
            if plugs[name].shape != parameter.shape:
                problem = f"plug {name!r} has shape {list(plugs[name].shape)}"
                raise FczooError(f"{problem}; give the module's shape {list(parameter.shape)}")
        for name, parameter in self.plugs().items():
            parameter.copy_(plugs[name])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PluggedViT":
        """Apply a function to all tensors, as ``to`` and ``double`` do."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._bind()
        return self

    def _bind(self) -> None:
        """Build the backbone from the buffers."""
        self.backbone = Backbone(self._config, self._weights.tree(), self._sha256, copy=False)

    def extra_repr(self) -> str:
        """Return one line about the backbone and the number of parameters."""
        numbers = sum(parameter.numel() for parameter in self.plugs().values())
        return (
            f"{self._config.name}, {plural(len(self._names), 'plug')} with {numbers:,} parameters"
        )


class TensorBuffers(nn.Module):
    """Named tensors as buffers, which follow the module to its device."""

    def __init__(self, tensors: Mapping[str, Tensor], persistent: bool = True):
        """Create the module.

        Args:
            tensors: Tensors by their names.
            persistent: Whether ``state_dict`` contains them.
        """
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(flat_name(name), value, persistent=persistent)
        self.names = tuple(tensors)

    def tree(self) -> Tree:
        """Return the tensors by their own names, in order."""
        return {name: self.get_buffer(flat_name(name)) for name in self.names}


def flat_name(name: str) -> str:
    """Return the name of a tensor in a module, without dots and unlike any attribute's name.

    Args:
        name: Name of the tensor.
    """
    return f"/{name.replace('.', '/')}"


def _check_plugs(backbone: Backbone, plugs: Any) -> None:
    """Check names, types and shapes of plugs by a forward on the meta device.

    Raises:
        FczooError: A plug does not fit; the message has its name, or the error of the forward.
    """
    if not isinstance(plugs, Mapping) or not plugs:
        raise FczooError(f"plugs is {quote(plugs)}; give a dict, name of a plug -> tensor")
    for name, value in plugs.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise FczooError(f"plug {name!r} is not a tensor of floating-point numbers")
    backbone.check_plugs(plugs)
    for name in plugs:
        stem = name.rpartition(".")[0]
        partners = PARTNERS.get(name.partition(".")[0], ())
        if missing := [f"{stem}.{p}" for p in partners if f"{stem}.{p}" not in plugs]:
            raise FczooError(f"plug {name!r} needs {missing[0]!r} as well; give both")
    config = backbone.config
    shapes = {name: torch.empty(shape, device="meta") for name, shape in config.shapes().items()}
    image = torch.empty(1, 3, config.image_size, config.image_size, device="meta")
    values = {name: value.to("meta", torch.float32) for name, value in plugs.items()}
    try:
        Backbone(config, shapes, copy=False)(image, values)
    except RuntimeError as error:
        problem = f"the plugs do not fit {config.name}, which has width {config.dim}"
        raise FczooError(f"{problem}: {first_line(error)}") from error
