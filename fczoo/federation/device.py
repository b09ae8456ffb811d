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


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Inside it results closer to zero than normal numbers (1.2e-38 in fp32) are zero, on one CPU thread.

    Processors compute several times slower with such numbers, and attention on large prompts is full of
    them. With more threads nothing is set: those of torch that run already would not follow, so that bits
    would depend on what the process did before.
    """
    was_set = torch.tensor(1e-38).div(10).item() == 0
    if was_set or torch.get_num_threads() > 1 or not torch.set_flush_denormal(True):
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)  # numpy warns of a process that has it


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
