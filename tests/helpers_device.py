"""A pretend accelerator: it finds tensors of two devices in one operation without a GPU.

Its tensors hold CPU tensors and claim to be on another device. Inside ``pretend_device`` an
operation between one of them and a CPU tensor is refused as CUDA refuses it. Everything for which
the host has to wait is counted: copies either way, and values or shapes that are read from the
device.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fczoo
from fczoo import Benchmark
from fczoo.data.views import ImageStore

PRETEND = torch.device(
    "meta"
)  # the one name in addition to "cpu" that autograd takes without a driver
CPU = torch.device("cpu")
ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)  # the operations that may see both devices
SAME_DEVICE = (ATEN.cat.default, ATEN.stack.default)  # of which CUDA takes not even a CPU scalar
READS = {  # the host waits for a value, or for a shape that depends on values
    ATEN._local_scalar_dense.default: "value",
    ATEN.equal.default: "value",
    ATEN.nonzero.default: "shape",
    ATEN.masked_select.default: "shape",
    ATEN.bincount.default: "shape",
    ATEN._unique2.default: "shape",
    ATEN.unique_dim.default: "shape",
    ATEN.unique_consecutive.default: "shape",
    ATEN.repeat_interleave.Tensor: "shape",
}
MASK_OPERATORS = (
    ATEN.index.Tensor,
    ATEN.index_put.default,
    ATEN.index_put_.default,
    ATEN._index_put_impl_.default,
)
HOUSE = tuple(str(Path(folder).resolve()) for folder in fczoo.__path__) + tuple(
    str(Path(__file__).resolve().parents[1] / room) for room in ("methods", "baselines")
)


class PretendTensor(Tensor):
    """A tensor on the pretend device; ``inner`` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PRETEND,
        )
        tensor.inner = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the pretend device outside of pretend_device")


class PretendGenerator(torch.Generator):
    """A generator that reports on which device it is."""

    def __new__(cls, device: torch.device | str = "cpu") -> "PretendGenerator":
        generator = super().__new__(cls, "cpu")
        generator.where = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.where


class _Sources(TorchFunctionMode):
    """The checks of where numbers come from.

    Generators must be on the device that they fill. Tensors made of Python numbers, which torch
    would leave empty on a device of the borrowed name, are copied to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, PretendGenerator):
            target_device = args[0].device if isinstance(args[0], Tensor) else kwargs.get("device")
            if _on(target_device) != _on(generator.device):
                raise RuntimeError(f"{func}: its generator is on {generator.device}")
        if func is Tensor.new_tensor and args[0].device == PRETEND:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(PRETEND)
        if func in (torch.tensor, torch.as_tensor) and _on(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": None}).to(PRETEND)
        if (
            func is Tensor.tolist
        ):  # torch refuses it for subclasses; what it does with a device's tensors
            return func(args[0].cpu())
        return func(*args, **kwargs)


class PretendDevice(TorchDispatchMode):
    """Run what is on ``PRETEND``.

    ``waits`` counts by kind and by the function of fczoo that waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs as much as an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves(kwargs.values(), _leaves(args, []))
        if not any(map(_on_pretend_device, leaves)):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # there torch leaves it to us to take operations apart
                return func.decompose(*args, **kwargs)
        with torch.inference_mode(False):  # so that a view of what was made outside can be wrapped
            return self._run(func, args, kwargs, [x for x in leaves if isinstance(x, Tensor)])

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        wrappers = {id(x.inner): x for x in tensors if type(x) is PretendTensor}
        target = bool(wrappers)
        if kwargs.get("device") is not None:
            target = _on(kwargs["device"])
            kwargs = {**kwargs, "device": CPU}
        if func in COPIES:
            source = isinstance(args[1] if func is ATEN.copy_.default else args[0], PretendTensor)
            target = isinstance(args[0], PretendTensor) if func is ATEN.copy_.default else target
            if source != target:
                self._note("to the host" if source else "to the device")
        elif wrappers:
            if len(wrappers) < len(tensors):
                self._refuse_mixed(func, tensors)
            self._note_read(func, args)
        inner_kwargs = {name: _inner(value) for name, value in kwargs.items()}
        out = func(*[_inner(value) for value in args], **inner_kwargs)
        return _outer(out, wrappers) if target else out

    def _refuse_mixed(self, func: Any, leaves: list[Tensor]) -> None:
        cpu_tensors = [leaf for leaf in leaves if not isinstance(leaf, PretendTensor)]
        written = func._schema.is_mutable and cpu_tensors and leaves[0] is cpu_tensors[0]
        if written or any(leaf.dim() or func in SAME_DEVICE for leaf in cpu_tensors):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in cpu_tensors)
            raise RuntimeError(f"{func}: tensors on the device and on the CPU ({shapes}) are mixed")

    def _note_read(self, func: Any, args: Any) -> None:
        mask = func in MASK_OPERATORS and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if mask or func in READS:
            self._note("shape" if mask else READS[func])

    def _note(self, kind: str) -> None:
        self.waits[kind, _caller()] += 1


@contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Treat ``PRETEND`` as a device while the context is open."""
    with mock.patch("torch.Generator", PretendGenerator), _Sources(), PretendDevice() as device:
        yield device


def _on(device: Any) -> bool:
    return device is not None and torch.device(device) == PRETEND


def _on_pretend_device(leaf: Tensor | torch.device) -> bool:
    return leaf == PRETEND if isinstance(leaf, torch.device) else type(leaf) is PretendTensor


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


def _leaves(tree: Iterable[Any], leaves: list[Any]) -> list[Any]:
    """Append the tensors and devices among an operation's arguments; torch's pytree is slow."""
    for part in tree:
        if isinstance(part, Tensor | torch.device):
            leaves.append(part)
        elif isinstance(part, list | tuple):
            _leaves(part, leaves)
    return leaves


def _inner(value: Any) -> Any:
    """Take the numbers out of every tensor of an argument."""
    if type(value) is PretendTensor:
        return value.inner
    if isinstance(value, list | tuple):
        return [_inner(part) for part in value]
    return value


def _outer(value: Any, wrappers: dict[int, PretendTensor]) -> Any:
    """Wrap every tensor of a result; an operation in place returns the wrapper it was given."""
    if isinstance(value, Tensor):
        return wrappers[id(value)] if id(value) in wrappers else PretendTensor(value)
    if isinstance(value, list | tuple):
        return type(value)([_outer(part, wrappers) for part in value])
    return value


def _caller() -> str:
    """Return file and function of fczoo's innermost frame."""
    frame: Any = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith(HOUSE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "test"


def to_pretend_device(bench: Benchmark) -> Benchmark:
    """Return the benchmark with its backbone and images on the pretend device."""
    backbone = bench.backbone.to(PRETEND)
    stores = (ImageStore(images, backbone) for images in (bench.stream.train, bench.stream.test))
    return replace(
        bench, **{"backbone": backbone, **dict(zip(("train", "test"), stores, strict=True))}
    )
