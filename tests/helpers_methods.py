"""Tools of the tests of methods: tolerance, width of the test backbone, quick methods, batches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fczoo import Batch, Benchmark, Method, create_method
from fczoo.core.registry import METHODS
from fczoo.protocols.registry import PROTOCOLS
from fczoo.testing.toy_benchmark import small_method

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64
DIM = 32
FEW_INVERSIONS = {"inversion_steps": 1, "inversion_inner": 2}
CONFORMANCE_OPTIONS: dict[str, dict[str, Any]] = {"glfc": FEW_INVERSIONS, "lga": FEW_INVERSIONS}
"""Options of methods most of whose time is one loop, for the conformance kit.

More steps of the loop are those of test_glfc.py, test_options.py and the recorded outputs.
"""
SHORT_LOOPS: dict[str, dict[str, Any]] = {
    **CONFORMANCE_OPTIONS,
    "fisheravg": {"fisher": "weighted"},  # a gradient per image, not per image and class
    "lander": {"synthesis_rounds": 2, "warmup": 1},
}
"""Options of such methods for other tests of every method."""
TRAIN_ALL_WEIGHTS = ("fedavg", "lwf", "regmean", "slca")
"""Methods that train all weights in tests of every method; others with ``tune`` train LoRA pairs.

The conformance kit runs every method with its default.
"""


def quick_method(name: str, **options: Any) -> Method:
    """Create a small method without long loops, which trains few tensors."""
    has_lora = "tune" in METHODS.get(name).__dataclass_fields__ and name not in TRAIN_ALL_WEIGHTS
    lora = {"tune": "lora"} if has_lora else {}
    return small_method(name, **{**lora, **SHORT_LOOPS.get(name, {}), **options})


def first_tasks(bench: Benchmark, tasks: int) -> Benchmark:
    """Return a benchmark of the first tasks of another."""
    return replace(
        bench,
        stream=replace(bench.stream, tasks=bench.stream.tasks[:tasks]),
        partition=replace(bench.partition, tasks=bench.partition.tasks[:tasks]),
    )


def compared_method(name: str, **options: Any) -> Method:
    """Create a method as HGP's comparison has it, on CIFAR-100 at beta 0.5."""
    return create_method(name, **{**PROTOCOLS.get("hgp").options(name, "cifar100", 0.5), **options})


def batch(
    x: Tensor, y: list[int] | Tensor, t: Tensor | None = None, w: Tensor | None = None
) -> Batch:
    """Make a batch whose images are their own query features.

    Args:
        x: Features [n, D].
        y: Labels [n].
        t: Random numbers [n, columns]; no columns without them.
        w: Weights of the images [n]; ones without them.
    """
    y = torch.as_tensor(y)
    return Batch(
        x,
        y,
        torch.ones(len(y), dtype=x.dtype) if w is None else w,
        x,
        x.new_empty(len(y), 0) if t is None else t,
    )
