"""Measure the training speed of clients next to a reference loop in the style of released code.

    python benchmarks/step.py --methods hgp,fppl --backbones vit_nano_32 --precisions fp32,bf16

fczoo's side is ``Engine.train``: one round of every client. The reference is ``Reference`` below:
one client after another, a timm model in float32 whose every weight gets a gradient, although only
what the method adds is stepped, PIL transforms image by image in the training thread, and for
methods with a query a second forward per step. Both train the same tensors on the same images with
the same loss, and end with the method's pass for class statistics, if it has one. The reference
keeps one model for all its clients. Sides take turns after a warm-up, and a ratio is the median
over the turns. Peak memory is measured in a separate process per side. ``of GEMM`` is the rate of
fczoo's operations in matrix products and attention, as a part of the rate of the backbone's largest
product, in the same precision and with as many threads: the rest goes to everything else. Weights
are random, images synthetic: nothing is fetched.
"""

import ctypes
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from step_sides import (
    AUGMENT,
    CONFIGS,
    EPOCHS,
    PIXELS,
    Case,
    Reference,
    Side,
    Variant,
    check_gradients,
    fczoo_side,
    largest_difference,
    one_by_one,
    pil_view,
)
from tabulate import tabulate
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fczoo import create_method
from fczoo.core.backbone import Backbone
from fczoo.core.registry import AUGMENTATIONS
from fczoo.data.views import DRAWS, Augment, ImageStore, get_augment
from fczoo.federation.device import DTYPES
from fczoo.federation.environment import peak_memory, reset_peak_memory, versions


def take_turns(
    case: Case, sides: Mapping[Any, Side]
) -> tuple[dict[Any, list[float]], dict[Any, Any]]:
    """Return seconds of every side in every turn but the first, and its last result."""
    times: dict[Any, list[float]] = {name: [] for name in sides}
    results = {}
    for turn in range(case.repeats + 1):
        for name, run in sides.items():
            begin = case.read_clock()
            results[name] = run()
            times[name] += [case.read_clock() - begin] if turn else []
    return times, results


def speedup(slow: list[float], fast: list[float]) -> float:
    """Return the median ratio of times over turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def peak_mib(case: Case, variant: Variant | None) -> float:
    """Return peak memory of one round in MiB.

    It is that of the process beyond its imports, or that of CUDA's allocator.
    """
    device = torch.device(case.device)
    import_memory = peak_memory(device).get("run", math.nan)  # without Linux, no memory is measured
    run: Side = fczoo_side(case, variant) if variant else Reference(case)
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what glibc keeps of the preparation
    reset_peak_memory(device)
    run()
    peak = peak_memory(device)
    return (
        peak["cuda"] if case.device == "cuda" else peak.get("run", math.nan) - import_memory
    ) / 2**20


def gemm_rate(case: Case, precision: str) -> float:
    """Return operations per second of a block's largest product: the best of many turns."""
    config, dtype = CONFIGS[case.backbone], DTYPES[precision]
    rows = case.batch_size * (1 + (config.image_size // config.patch_size) ** 2)
    x = torch.randn(rows, config.dim, device=case.device, dtype=dtype)
    weight = torch.randn(config.mlp_dim, config.dim, device=case.device, dtype=dtype)
    seconds = []
    for _ in range(30):
        begin = case.read_clock()
        for _ in range(10):
            F.linear(x, weight)
        seconds.append((case.read_clock() - begin) / 10)
    return 2 * rows * config.dim * config.mlp_dim / min(seconds)


def operations(run: Side) -> int:
    """Count the operations of one round in matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measure_steps(case: Case, variants: list[Variant], memory: bool) -> list[dict[str, Any]]:
    """Return one row per variant.

    ``gain`` and ``difference`` compare it with the first variant of its precision.
    """
    check_gradients(case)
    sides: dict[Variant | None, Side] = {
        None: Reference(case),
        **{v: fczoo_side(case, v) for v in variants},
    }
    times, payloads = take_turns(case, sides)
    speed = {v: case.clients * case.each * EPOCHS / statistics.median(t) for v, t in times.items()}
    peaks: dict[Variant | None, int] = {}
    if memory:
        with ProcessPoolExecutor(1, get_context("forkserver"), max_tasks_per_child=1) as pool:
            peaks = {v: round(pool.submit(peak_mib, case, v).result()) for v in sides}
    rates = {p: gemm_rate(case, p) for p in {v.precision for v in variants}}
    rows = []
    for v in variants:
        first = next(w for w in variants if w.precision == v.precision)
        row = {
            "method": case.method,
            "backbone": case.backbone,
            "augment": case.augment,
            **asdict(v),
        }
        row |= {
            "image-steps/s": speed[v],
            "reference": speed[None],
            "ratio": speedup(times[None], times[v]),
            "of GEMM": operations(sides[v]) / statistics.median(times[v]) / rates[v.precision],
            "MiB": peaks.get(v),
            "reference MiB": peaks.get(None),
            "gain": speedup(times[first], times[v]),
        }
        rows.append(
            {
                **row,
                "difference": None
                if v.cache_queries
                else largest_difference(payloads[first], payloads[v]),
            }
        )
    return rows


def measure_transforms(case: Case) -> list[dict[str, Any]]:
    """Return images/s of the transforms only."""
    config, images, rows = CONFIGS[case.backbone], case.images(), []
    store = ImageStore(images, Backbone(config, case.start()[1].state_dict()))
    blocks, draws = (
        torch.arange(len(images.labels)).split(case.batch_size),
        torch.rand(len(images.labels), DRAWS),
    )

    def batch_view(augment: Augment, index: Tensor) -> Tensor:
        return (
            store.view(index)
            if augment.is_fixed
            else store.training_view(index, augment, draws[index])
        )

    def count_images(transform: Callable[[Tensor], Tensor]) -> int:
        return sum(len(transform(index)) for index in blocks)

    for name in AUGMENTATIONS.names():
        augment = get_augment(name)
        pil = partial(one_by_one, pil_view(augment, config), images.pixels, case.device)
        times, _ = take_turns(
            case,
            {
                "pil": partial(count_images, pil),
                "fczoo": partial(count_images, partial(batch_view, augment)),
            },
        )
        speeds = {
            side: round(len(images.labels) / statistics.median(t)) for side, t in times.items()
        }
        rows.append(
            {
                "augment": name,
                "pixels": f"{PIXELS} to {config.image_size}",
                **speeds,
                "ratio": speedup(times["pil"], times["fczoo"]),
            }
        )
    return rows


def parse_words(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    """Return the words of a comma-separated list."""
    return value.split(",")


@click.command(context_settings={"show_default": True})
@click.option("--methods", default=",".join(AUGMENT), callback=parse_words)
@click.option(
    "--backbones",
    default="vit_nano_32,vit_tiny_patch16_224",
    callback=parse_words,
    help=f"Of {', '.join(CONFIGS)}.",
)
@click.option(
    "--precisions",
    default="fp32,bf16",
    callback=parse_words,
    help="Of fczoo; the reference is always fp32.",
)
@click.option(
    "--together",
    default="1,10",
    callback=parse_words,
    help="Clients in one forward of fczoo; the largest is the number of clients.",
)
@click.option(
    "--augment",
    type=click.Choice(AUGMENTATIONS.names()),
    help="View of the training images, for all methods.  [each paper's own]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--batch-size", default=16)
@click.option("--steps", default=2 * EPOCHS, help="Of a client in a round.")
@click.option("--repeats", default=3)
@click.option("--threads", default=torch.get_num_threads())
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    help="cpu: process time, for a busy machine, with --threads 1.",
)
@click.option("--memory/--no-memory", default=True, help="Measure peak memory, too.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all numbers to this JSON file.",
)
def main(
    methods: list[str],
    backbones: list[str],
    precisions: list[str],
    together: list[str],
    augment: str | None,
    memory: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Print image-steps/s and memory of fczoo next to a plain reference loop."""
    cuda = options["device"] == "cuda"
    machine = {
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "cpus": os.cpu_count(),
        **options,
        **versions(),
    }
    print(" ".join(f"{k}={v}" for k, v in machine.items()))
    widths, transforms, steps = [int(k) for k in together], [], []
    for backbone in backbones:
        cases = [
            Case(method, backbone, augment or AUGMENT[method], clients=max(widths), **options)
            for method in methods
        ]
        transforms += (rows := measure_transforms(cases[0]))
        print(
            f"\n{backbone}: transforms, images/s\n{tabulate(rows, 'keys', floatfmt='.3g')}",
            flush=True,
        )
        for case in cases:
            variants = [Variant(p, k) for p in precisions for k in widths]
            if (
                "query" in create_method(case.method).training().inputs
                and not get_augment(case.augment).is_fixed
            ):
                variants += [Variant(p, widths[0], cache_queries=True) for p in precisions]
            steps += (rows := measure_steps(case, variants, memory))
            print(f"\n{tabulate(rows, 'keys', floatfmt='.3g')}", flush=True)
    if out:
        out.write_text(
            json.dumps({"machine": machine, "transforms": transforms, "steps": steps}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
