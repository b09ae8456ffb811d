"""Compression of uploads (``--compress``): lossy codes of trained tensors.

A client encodes the change of each trained tensor, plus the error of its earlier codes in the task
(error feedback; Seide et al., 2014; Karimireddy et al., ICML 2019). The server decodes an upload
before it validates it. Statistics, control variates, and tensors whose code would not be smaller
are sent exactly.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload
from fczoo.core.registry import COMPRESSIONS, register_compression
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree, nbytes

PART = "@"  # between the name of a tensor and that of a part of its code
MAX_FLOAT16 = 65504.0  # of float16
LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Compression(ABC):
    """Code of one tensor: a few smaller tensors, whose shapes depend only on its shape."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def layout(self, like: Tensor) -> Tree:
        """Return the parts of the code of a tensor, without values (device ``meta``)."""

    @abstractmethod
    def encode(self, value: Tensor) -> Tree:
        """Return the code of a tensor, with the parts of ``layout``."""

    @abstractmethod
    def decode(self, code: Tree, like: Tensor) -> Tensor:
        """Return the tensor of a code, with shape and type of ``like``.

        Raises ValueError for a code that ``encode`` cannot have made.
        """

    def shrinks(self, like: Tensor) -> bool:
        """Return whether the code of a tensor is smaller than the tensor."""
        return like.is_floating_point() and nbytes(self.layout(like)) < nbytes({"": like})


def _part(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@register_compression("int8")
@dataclass(frozen=True)
class Int8(Compression):
    """Whole numbers from -127 to 127 and one scale per tensor, its largest absolute value / 127."""

    def layout(self, like: Tensor) -> Tree:
        return {"values": _part(like.shape, torch.int8), "scale": _part((), torch.float32)}

    def encode(self, value: Tensor) -> Tree:
        scale = (value.abs().amax() / 127).float()
        steps = value / torch.where(scale > 0, scale, torch.ones_like(scale)).to(value)
        return {"values": steps.round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def decode(self, code: Tree, like: Tensor) -> Tensor:
        return code["values"].to(like) * code["scale"].to(like)


@register_compression("fp16")
@dataclass(frozen=True)
class Fp16(Compression):
    """Floating-point numbers of 16 bits, at most 65,504."""

    def layout(self, like: Tensor) -> Tree:
        return {"values": _part(like.shape, torch.float16)}

    def encode(self, value: Tensor) -> Tree:
        return {"values": value.clamp(-MAX_FLOAT16, MAX_FLOAT16).half()}

    def decode(self, code: Tree, like: Tensor) -> Tensor:
        return code["values"].to(like)


@register_compression("topk")
@dataclass(frozen=True)
class TopK(Compression):
    """The entries of a tensor with the largest absolute values, and their positions.

    Among equal values the first are taken.
    """

    part: float = option(0.01, "share of a tensor's entries, at least one entry", low=1e-9, high=1)

    def layout(self, like: Tensor) -> Tree:
        count = min(max(1, round(self.part * like.numel())), like.numel())
        positions = torch.int32 if like.numel() <= LARGEST_INT32 else torch.int64
        return {"values": _part((count,), like.dtype), "positions": _part((count,), positions)}

    def encode(self, value: Tensor) -> Tree:
        form, flat = self.layout(value), value.flatten()
        size, count = flat.abs(), len(form["values"])
        least = size.topk(count).values[-1]  # the value is the same for any order of equal ones
        above = (size > least).nonzero()[:, 0]
        equal = (size == least).nonzero()[: count - len(above), 0]
        positions = torch.cat([above, equal]).sort().values
        return {"values": flat[positions], "positions": positions.to(form["positions"].dtype)}

    def decode(self, code: Tree, like: Tensor) -> Tensor:
        positions = code["positions"].long()
        in_order = bool((positions[1:] > positions[:-1]).all())
        if not in_order or positions[0] < 0 or positions[-1] >= like.numel():
            raise ValueError("positions are not ascending, or outside the tensor")
        flat = torch.zeros_like(like).flatten()
        flat[positions] = code["values"]
        return flat.view_as(like)


@register_compression("lowrank")
@dataclass(frozen=True)
class LowRank(Compression):
    """Two factors of a low rank, as PowerSGD (Vogels et al., NeurIPS 2019) has them.

    A tensor counts as a matrix M with its first dimension as rows. P is an orthonormal basis after
    some steps of subspace iteration from a fixed start, and Q = M^T P; M becomes P Q^T.
    """

    rank: int = option(4, "rank of the factors", low=1)
    iterations: int = option(3, "steps of subspace iteration", low=1)

    def layout(self, like: Tensor) -> Tree:
        rows = like.shape[0] if like.dim() > 1 else like.numel()
        columns = like.numel() // max(rows, 1)
        rank = min(self.rank, rows, columns)
        return {
            "left": _part((rows, rank), like.dtype),
            "right": _part((columns, rank), like.dtype),
        }

    def encode(self, value: Tensor) -> Tree:
        columns, rank = self.layout(value)["right"].shape
        exact = torch.promote_types(value.dtype, torch.float32)
        matrix = value.to(exact).view(-1, columns)
        start = torch_stream("low rank", columns, rank)
        right = torch.randn(columns, rank, generator=start, dtype=torch.float64).to(matrix)
        for _ in range(self.iterations):
            left: Tensor = torch.linalg.qr(matrix @ right).Q
            right = matrix.mT @ left
        return {"left": left.to(value.dtype), "right": right.to(value.dtype)}

    def decode(self, code: Tree, like: Tensor) -> Tensor:
        return (code["left"] @ code["right"].mT).view_as(like)


def make_compression(spec: str | None) -> Compression | None:
    """Create a compression from ``NAME`` or ``NAME:VALUE``; None without a spec.

    Raises FczooError for an unknown name and for a value that does not fit.
    """
    compression: Compression | None = COMPRESSIONS.create(spec) if spec else None
    return compression


def encode_upload(
    compression: Compression, upload: Payload, start: Tree, residuals: Tree
) -> tuple[Payload, Tree]:
    """Encode the trained tensors of an upload.

    Args:
        compression: Code of a tensor.
        upload: Upload of a client.
        start: Trained tensors as the server sent them.
        residuals: Error of the client's earlier codes, by tensor; a missing one is zero.

    Returns:
        The upload with ``NAME@PART`` in place of ``NAME``, and the new residuals.
    """
    tensors, residuals = dict(upload), dict(residuals)
    for name in _encoded_names(compression, upload, start):
        value = tensors.pop(name)
        change = value - start[name].to(value)
        if name in residuals:
            change = change + residuals[name].to(change)
        code = compression.encode(change)
        residuals[name] = change - compression.decode(code, change)
        tensors |= {f"{name}{PART}{part}": tensor for part, tensor in code.items()}
    return upload.holding(tensors), residuals


def decode_upload(compression: Compression, upload: Payload, start: Tree) -> Payload:
    """Decode an upload of ``encode_upload``.

    A tensor whose code has other parts, shapes or types stays encoded. Validation then rejects the
    upload, because it lacks the tensor. Tensors are decoded on the device of their codes, which may
    be the host.
    """
    tensors = dict(upload)
    for name, sent in start.items():
        if not compression.shrinks(sent):
            continue
        form = compression.layout(sent)
        code = {part: tensors.get(f"{name}{PART}{part}") for part in form}
        known = {part: value for part, value in code.items() if value is not None}
        if known.keys() < form.keys() or any(
            value.shape != form[part].shape or value.dtype != form[part].dtype
            for part, value in known.items()
        ):
            continue
        like = sent.to(next(iter(known.values())).device)
        try:
            change = compression.decode(known, like)
        except ValueError:
            continue
        tensors = {k: v for k, v in tensors.items() if not k.startswith(f"{name}{PART}")}
        tensors[name] = like + change
    return upload.holding(tensors)


def encoded_form(compression: Compression | None, upload: Payload, start: Tree) -> Payload:
    """Return an upload with codes that have shapes but no values, to count their bytes."""
    if compression is None:
        return upload
    tensors = dict(upload)
    for name in _encoded_names(compression, upload, start):
        form = compression.layout(tensors.pop(name))
        tensors |= {f"{name}{PART}{part}": tensor for part, tensor in form.items()}
    return upload.holding(tensors)


def _encoded_names(compression: Compression, upload: Payload, start: Tree) -> list[str]:
    """Return the names of the tensors of an upload that are encoded."""
    return [
        name
        for name, value in upload.items()
        if name in start
        and (value.shape, value.dtype) == (start[name].shape, start[name].dtype)
        and compression.shrinks(value)
    ]
