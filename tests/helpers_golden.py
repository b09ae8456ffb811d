"""Tools of the tests against recorded outputs: tolerances, files, the error, a plain backbone."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fczoo import Tree

F64, F64L, F32 = 1e-9, 1e-6, 2e-5


def golden(name: str) -> Tree:
    """Load a file of recorded outputs by its name."""
    return load_file(Path(__file__).parent / "methods" / "golden" / f"{name}.safetensors")


def error(ours: Tensor, official: Tensor) -> float:
    """Compute max |a - b| / max |b| of two tensors of the same shape."""
    assert ours.shape == official.shape
    return float((ours.detach() - official).abs().max() / official.abs().max())


class Identity:
    """A replacement for a backbone that returns its input.

    It serves where the official vectors start from features.
    """

    dtype, device = torch.float64, torch.device("cpu")

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images
