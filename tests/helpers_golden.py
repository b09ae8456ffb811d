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


LARGEST: dict[str, float] = {}
"""Largest error by file of recorded outputs, of the comparisons of this process."""


def compare(
    case: str, ours: Tensor, official: Tensor, tolerance: float, label: str = "", least: float = 0
) -> None:
    """Assert that the error is below a tolerance, and note it for ``--differences``.

    ``label`` names the tensor in the message; ``least`` is the smallest divisor of the error.
    """
    assert ours.shape == official.shape, label
    largest = max(float(official.abs().max()), least) or 1.0
    value = float((ours.detach() - official).abs().max()) / largest
    LARGEST[case] = max(LARGEST.get(case, 0.0), value)
    assert value < tolerance, label


class Identity:
    """A replacement for a backbone that returns its input.

    It serves where the official vectors start from features.
    """

    dtype, device = torch.float64, torch.device("cpu")

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images
