"""What the tests against recorded outputs share: tolerances, files, the error, a stand-in for a backbone."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fczoo import Tree

F64, F64L, F32 = 1e-9, 1e-6, 2e-5


def golden(name: str) -> Tree:
    return load_file(Path(__file__).parent / "methods" / "golden" / f"{name}.safetensors")


def error(ours: Tensor, official: Tensor) -> float:
    """max |a - b| / max |b|."""
    assert ours.shape == official.shape
    return float((ours.detach() - official).abs().max() / official.abs().max())


class Identity:
    """Stands in for a backbone where the official vectors start from features: what goes in comes out."""

    dtype, device = torch.float64, torch.device("cpu")

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images
