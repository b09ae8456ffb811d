"""Shape-only execution: count what a method sends and computes without the values of tensors.

Inside ``Outlines`` every operation with large inputs or outputs runs on shapes only, as on torch's
device "meta". Small tensors keep their values, so code that reads labels, counts or indices runs
unchanged. A large tensor is one number or row, expanded to its shape, which costs neither memory
nor time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig

MAX_ELEMENTS = 1 << 16  # elements above which a tensor is represented by its shape only


class Outlines(TorchDispatchMode):
    """Mode in which large tensors are outlines, with the right shape and type but wrong values.

    Values computed from an outline are 1, so that divisions and roots are finite. ``flops`` counts
    the operations of all products, as torch's ``FlopCounterMode`` does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        # bytes of the tensor that an outline represents, by address of the outline's storage
        self.bytes: dict[int, int] = {}
        self._numbers: list[Tensor] = []  # kept alive, so that no address is used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard against compilation would cost time per operation."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        alias = _aliases(func)
        if alias == "view":
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # the expanded row has other strides than the tensor
                alias = ""
        inputs = _tensors((*args, *kwargs.values()))
        if alias == "write":
            target = inputs[0]
            strides = zip(target.stride(), target.shape, strict=True)
            if _has_large(inputs) or any(step == 0 and size > 1 for step, size in strides):
                return args[0] if func._schema.returns else None  # outlines stay as they are
            return func(*args, **kwargs)
        large = _has_large(inputs)
        if inputs and not large and not _grows(func):
            return self._outline_large(func(*args, **kwargs))
        key = func, _shape_key(args), _shape_key(tuple(kwargs.items()))
        if key not in _RESULTS:
            _RESULTS[key] = _run_on_shapes(func, args, kwargs)
        result = _RESULTS[key]
        if result is None:
            return self._outline_large(func(*args, **kwargs))
        shapes, flops = result
        self.flops += flops
        if not (large or _has_large(shapes)):
            return func(*args, **kwargs)
        outputs = [self._filled_output(func, s) if isinstance(s, Tensor) else s for s in shapes]
        returns = func._schema.returns
        if len(returns) == 1 and "[]" in str(returns[0].type):
            return outputs
        return outputs[0] if len(returns) == 1 else tuple(outputs)

    def _filled_output(self, func: Any, shape: Tensor) -> Tensor:
        value = int(func not in _ZERO and (shape.is_floating_point() or shape.dtype == torch.bool))
        if shape.numel() > MAX_ELEMENTS:
            return self.outline(shape.shape, shape.dtype, value)
        return torch.full(shape.shape, value, dtype=shape.dtype)

    def _outline_large(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.outline(value.shape, value.dtype) if value.numel() > MAX_ELEMENTS else value
        if isinstance(value, tuple | list):
            return type(value)(map(self._outline_large, value))
        return value

    def outline(self, shape: Iterable[int], dtype: torch.dtype, value: int = 1) -> Tensor:
        """Return a tensor that represents one of this shape and type."""
        size = tuple(shape)
        # fused attention requires contiguous rows
        number = torch.full(
            size[-1:] if len(size) > 1 and size[-1] <= MAX_ELEMENTS else (), value, dtype=dtype
        )
        self._numbers.append(number)
        tensor = number.expand(size)
        self.bytes[number.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor


# operations that return 0: torch redraws truncated normals until no value is invalid
_ZERO = {
    torch.ops.aten.isnan.default,
    torch.ops.aten.isinf.default,
    torch.ops.aten.any.default,
}
# outputs on the device "meta" and flops, by operation and shapes of its inputs
_RESULTS: dict[Any, tuple[tuple[Any, ...], int] | None] = {}


@cache
def _grows(func: Any) -> bool:
    """Return whether small inputs may have a large output, as for products and diagonals."""
    return func._overloadpacket in flop_registry or func is torch.ops.aten.diag_embed.default


@cache
def _aliases(func: Any) -> Literal["view", "write", ""]:
    """Determine whether an operation returns a view of its input, writes into it, or neither."""
    infos = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return "write" if any(info.is_write for info in infos) else "view" if infos else ""


def _has_large(tensors: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.numel() > MAX_ELEMENTS for value in tensors)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _tensors(value)
    return tensors


def _shape_key(value: Any) -> Any:
    """Return a key of arguments: shape and type of tensors, the value of anything else."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_shape_key, value))
    return None if isinstance(value, torch.Generator) else (type(value), value)


def _run_on_shapes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], int] | None:
    """Return outputs and flops of an operation on shapes; None if they depend on values."""
    kwargs = {k: None if isinstance(v, torch.Generator) else _to_meta(v) for k, v in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    args = _to_meta(args)
    try:
        output = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    formula = flop_registry.get(func._overloadpacket)
    flops = formula(*args, **kwargs, out_val=output) if formula else 0
    return tuple(output) if isinstance(output, tuple | list) else (output,), flops


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return type(value)(map(_to_meta, value)) if isinstance(value, tuple | list) else value


class OutlineBackbone(Backbone):
    """Backbone that computes nothing: its outputs only have the right shapes.

    They depend on the images and on every plug, so that a loss has a gradient. An image is one
    patch, because no upload depends on the number of patches.
    """

    def __init__(self, config: ViTConfig):
        super().__init__(config, outline_weights(config), copy=False)
        self.config = replace(config, patch_size=config.image_size)

    def _forward(
        self,
        images: Tensor,
        plugs: Mapping[str, Tensor],
        pool: Literal["cls", "prompt", "cls+prompt"],
        seen: dict[str, Tensor],
    ) -> Tensor:
        self.check_plugs(plugs)
        value = images[:, :1, 0, 0].to(self.dtype)
        if plugs:
            value = value + torch.stack([plug.sum() for plug in plugs.values()]).sum().to(
                self.dtype
            )
        tokens = plugs["tokens"].shape[-2] if "tokens" in plugs else 0
        for tap in seen:
            width = self.config.mlp_dim if tap.endswith("mlp.fc2") else self.token_dim
            rows = tokens + self.config.tokens  # an image is one patch
            seen[tap] = value[:, None].expand(-1, rows, width)
            value = seen[tap][:, 0, :1]  # later outputs depend on it
        return value.expand(-1, self.dim).to(self._feature_dtype)


@cache
def outline_backbone(config: ViTConfig) -> OutlineBackbone:
    """Return the ``OutlineBackbone`` of a configuration."""
    return OutlineBackbone(config)


@cache
def outline_weights(config: ViTConfig) -> Tree:
    """Return one number per weight, expanded to its shape."""
    return {name: torch.ones(()).expand(shape) for name, shape in config.shapes().items()}
