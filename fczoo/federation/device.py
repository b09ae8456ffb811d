"""Device and precision of a run, and the number of clients that it trains at once."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from fczoo.core.errors import FczooError
from fczoo.data.views import Augment, get_augment
from fczoo.federation.settings import AUTO, Settings
from fczoo.federation.waiting_uploads import MEMORY_LIMIT, WaitingPlace

log = logging.getLogger("fczoo")


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@contextmanager
def deterministic_operations(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic operations if ``enabled``.

    Raises RuntimeError at an operation without a deterministic version.
    """
    if not enabled:  # then nothing is set: that alone takes two seconds
        yield
        return
    was_enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warn_only)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Set results below the normal range (1.2e-38 in fp32) to zero, on one CPU thread.

    Processors are several times slower with such numbers, and attention on large prompts has many
    of them. With several threads nothing is set: running threads of torch would not follow, so that
    results would depend on what the process did before.
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
    """Return a device by name.

    Raises FczooError if it is not available.
    """
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = next(d for d in ("cuda", "mps", "cpu") if available[d])
    if not available[name]:
        raise FczooError(
            f"no {name} device on this machine; found: "
            f"{', '.join(d for d, is_available in available.items() if is_available)}"
        )
    return torch.device(name)


MATRIX_SIZE = 256  # of the square matrices of a measured product
REPEATS = 3  # products, of which the fastest counts
SLOW_FACTOR = 1.2  # factor above which a run is warned


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of one matrix product on the CPU, the fastest of a few."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    matrix @ matrix  # the first product of a type prepares its kernel
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def bf16_slowdown() -> float:
    """Return the time of a product in bf16 divided by that in fp32, on this processor.

    The measurement takes about 0.1 s.
    """
    return product_seconds(torch.bfloat16) / product_seconds(torch.float32)


def fastest_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the faster of fp32 and bf16 on a device.

    It is fp32 if bf16 is not faster, or not supported by the hardware.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and bf16_slowdown() < 1 else "fp32"


def resolve_precision(settings: Settings) -> Settings:
    """Replace precision ``auto`` in settings by the fastest precision of their device."""
    if settings.precision != AUTO:
        return settings
    return replace(settings, precision=fastest_precision(pick_device(settings.device)))


def warn_of_slow_bf16(settings: Settings) -> None:
    """Warn if bf16 is slower than fp32 on the processor of a run, with the factor."""
    if settings.precision != "bf16" or pick_device(settings.device).type != "cpu":
        return
    if (factor := bf16_slowdown()) > SLOW_FACTOR:
        log.warning(
            "on this processor a matrix product in bf16 takes %.1f times as long as in fp32; "
            "give --precision fp32, or auto for the faster one",
            factor,
        )


TOGETHER_LIMIT = 4_000_000
"""Trained scalars a client, above which clients train one at a time by default."""


@dataclass(frozen=True)
class Plan:
    """Plan of local training."""

    epochs: int
    batch_size: int
    augment: Augment
    seed: int
    together: int = 1  # clients that share one forward
    # train with the query features of the test view, even if training views are random
    cache_queries: bool = False
    pass_size: int = 64  # batch of passes without training
    # where uploads wait for the merge; with host and disk, the device holds those of one group of
    # clients at a time
    waiting: WaitingPlace = "device"


def plan_of(
    settings: Settings, seed: int, device: torch.device, clients: int, trained_scalars: int
) -> Plan:
    """Create the plan of a run of ``clients`` clients that train ``trained_scalars`` each."""
    s, on_gpu = settings, device.type == "cuda"
    waiting: WaitingPlace = "device"
    if s.sampled_count(clients) * trained_scalars > MEMORY_LIMIT:
        waiting = "disk"
    elif on_gpu and trained_scalars > TOGETHER_LIMIT:
        waiting = "host"
    return Plan(
        s.epochs,
        s.batch_size,
        get_augment(s.augment),
        seed,
        group_size(s, device, clients, trained_scalars),
        s.cache_queries,
        256 if on_gpu else 64,
        waiting,
    )


def group_size(settings: Settings, device: torch.device, clients: int, trained_scalars: int) -> int:
    """Return the number of clients that share a forward."""
    if settings.together == "auto":
        return clients if device.type == "cuda" and trained_scalars <= TOGETHER_LIMIT else 1
    return settings.together
