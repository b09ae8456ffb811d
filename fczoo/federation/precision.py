"""The choice between fp32 and bf16, by their speed on a device.

A processor without bf16 instructions emulates them: a matrix product is then many times slower than in fp32.
"""

import logging
import time
from dataclasses import replace
from functools import cache
from typing import Literal

import torch

from fczoo.federation.device import pick_device
from fczoo.federation.settings import AUTO, Settings

log = logging.getLogger("fczoo")

SIDE = 256  # of the square matrices of a measured product
REPEATS = 3  # products, of which the fastest counts
SLOW = 1.2  # factor above which a run is warned


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of one matrix product on the CPU, the fastest of a few."""
    matrix = torch.ones(SIDE, SIDE, dtype=dtype)
    matrix @ matrix  # the first product of a type prepares its kernel
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def bf16_slowdown() -> float:
    """Return the time of a product in bf16 divided by that in fp32, on this processor (about 0.1 s)."""
    return product_seconds(torch.bfloat16) / product_seconds(torch.float32)


def fastest_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the faster of fp32 and bf16 on a device; fp32 where bf16 is not faster or not built in."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and bf16_slowdown() < 1 else "fp32"


def resolve_precision(settings: Settings) -> Settings:
    """Return settings with the precision that ``auto`` stands for on their device."""
    if settings.precision != AUTO:
        return settings
    return replace(settings, precision=fastest_precision(pick_device(settings.device)))


def warn_of_slow_bf16(settings: Settings) -> None:
    """Warn, with the factor, where bf16 is slower than fp32 on the processor of a run."""
    if settings.precision != "bf16" or pick_device(settings.device).type != "cpu":
        return
    if (factor := bf16_slowdown()) > SLOW:
        log.warning(
            "on this processor a matrix product in bf16 takes %.1f times as long as in fp32; "
            "give --precision fp32, or auto for the faster one",
            factor,
        )
