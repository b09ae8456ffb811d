"""A pretend accelerator, so that tensors on two devices cannot be mixed unseen where there is no GPU.

Its tensors hold CPU tensors and say that they are elsewhere. Inside ``pretend_device`` an operation between
one of them and a CPU tensor is refused as CUDA refuses it, and everything for which the host has to wait is
counted: copies either way, and values or shapes that are read from the device.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fczoo
from fczoo import Bench
from fczoo.data.views import ImageStore

PRETEND = torch.device("meta")  # the one name besides "cpu" that autograd takes without a driver
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
MASKED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)
HOUSE = tuple(str(Path(place).resolve()) for place in fczoo.__path__) + tuple(
    str(Path(__file__).resolve().parents[1] / room) for room in ("methods", "baselines")
)


class Elsewhere(Tensor):
    """A tensor on the pretend device; ``inner`` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PRETEND,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the pretend device outside of pretend_device")


class PretendGenerator(torch.Generator):
    """A generator that says on which device it is."""

    def __new__(cls, device: torch.device | str = "cpu") -> "PretendGenerator":
        made = super().__new__(cls, "cpu")
        made.where = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.where


class _Sources(TorchFunctionMode):
    """Where numbers come from: generators must be on the device that they fill, and tensors made of Python
    numbers, which torch would leave empty on a device of the borrowed name, are copied there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if isinstance(generator, PretendGenerator):
            filled = args[0].device if isinstance(args[0], Tensor) else kwargs.get("device")
            if _on(filled) != _on(generator.device):
                raise RuntimeError(f"{func}: its generator is on {generator.device}")
        if func is Tensor.new_tensor and args[0].device == PRETEND:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(PRETEND)
        if func in (torch.tensor, torch.as_tensor) and _on(kwargs.get("device")):
            del kwargs["device"]
            return func(*args, **kwargs).to(PRETEND)
        if func is Tensor.tolist:  # torch refuses it for subclasses; what it does with a device's tensors
            return func(args[0].cpu())
        return func(*args, **kwargs)


class PretendDevice(TorchDispatchMode):
    """Runs what is on ``PRETEND``. ``waits`` counts by kind and by the function of fczoo that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not any(_elsewhere(leaf) for leaf in _leaves(args, kwargs)):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # there torch leaves it to us to take operations apart
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        with torch.inference_mode(False):  # so that a view of what was made outside can be wrapped
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
        target = bool(there)
        if "device" in kwargs and kwargs["device"] is not None:
            target = _on(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        if func in COPIES:
            source = isinstance(args[1] if func is ATEN.copy_.default else args[0], Elsewhere)
            target = isinstance(args[0], Elsewhere) if func is ATEN.copy_.default else target
            if source != target:
                self._note("to the host" if source else "to the device")
        elif there:
            self._refuse_mixed(func, leaves)
            self._note_read(func, args)
        wrappers = {id(leaf.inner): leaf for leaf in there}
        out = func(*tree_map_only(Elsewhere, _inner, args), **tree_map_only(Elsewhere, _inner, kwargs))
        if not target:
            return out
        return tree_map_only(Tensor, lambda tensor: _outer(tensor, wrappers), out)

    def _refuse_mixed(self, func: Any, leaves: list[Tensor]) -> None:
        here = [leaf for leaf in leaves if not isinstance(leaf, Elsewhere)]
        written = func._schema.is_mutable and here and leaves[0] is here[0]
        if written or any(leaf.dim() or func in SAME_DEVICE for leaf in here):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in here)
            raise RuntimeError(f"{func}: tensors on the device and on the CPU ({shapes}) are mixed")

    def _note_read(self, func: Any, args: Any) -> None:
        mask = func in MASKED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if mask or func in READS:
            self._note("shape" if mask else READS[func])

    def _note(self, kind: str) -> None:
        self.waits[kind, _place()] += 1


@contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Inside it ``PRETEND`` is a device."""
    with mock.patch("torch.Generator", PretendGenerator), _Sources(), PretendDevice() as device:
        yield device


def _on(device: Any) -> bool:
    return device is not None and torch.device(device) == PRETEND


def _elsewhere(leaf: Tensor | torch.device) -> bool:
    return isinstance(leaf, Elsewhere) if isinstance(leaf, Tensor) else leaf == PRETEND


def _leaves(*trees: Any) -> Iterator[Any]:
    """Tensors and devices among an operation's arguments."""
    return (leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor | torch.device))


def _inner(tensor: Elsewhere) -> Tensor:
    return tensor.inner


def _outer(tensor: Tensor, wrappers: dict[int, Elsewhere]) -> Elsewhere:
    """What an operation in place returns is what it was given."""
    return wrappers[id(tensor)] if id(tensor) in wrappers else Elsewhere(tensor)


def _place() -> str:
    """File and function of fczoo's innermost frame."""
    frame: Any = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith(HOUSE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "test"


def moved(bench: Bench) -> Bench:
    """The benchmark with its backbone and images on the pretend device."""
    backbone = bench.backbone.to(PRETEND)
    stores = (ImageStore(images, backbone) for images in (bench.stream.train, bench.stream.test))
    return replace(bench, **{"backbone": backbone, **dict(zip(("train", "test"), stores, strict=True))})
