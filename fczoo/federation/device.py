"""Devices and number formats."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fczoo.core.errors import FczooError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Inside it, if ``wanted``, torch uses only deterministic
    operations and raises RuntimeError where it has none.
    """
    if not wanted:  # then nothing is set: that alone takes two seconds
        yield
        return
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def pick_device(name: str) -> torch.device:
    """Device by name. Raises FczooError when it is not there."""
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(d for d in ("cuda", "mps", "cpu") if found[d])
    if not found[name]:
        raise FczooError(
            f"no {name} device on this machine; found: {', '.join(d for d, here in found.items() if here)}"
        )
    return torch.device(name)
