"""Check fczoo on a GPU in one call: numbers, whole runs, speed and memory.

    python benchmarks/gpu.py --device cuda --data-root DATA --out gpu
    python benchmarks/gpu.py --device cpu --small --out gpu    # tries the script itself

1. Same numbers: every method runs on the CPU in float64, in the toy benchmark. Every round and
   collection of statistics is repeated on the device from the same state. Uploads may differ only
   by rounding.
2. Whole runs on the device, with an attack and with one or three clients per forward. They must
   give the same results if the run is killed after its first round and resumed. In bfloat16 they
   must only finish.
3. ``step.py``: speed and peak memory of training steps next to a plain loop.
4. HGP's schedule of CIFAR-100 (ten tasks, ViT-B/16), if data and weights are available.

The exit code is the number of parts that failed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from tabulate import tabulate

from fczoo import Benchmark, Context, Method, Tree
from fczoo.core.payload import Payload
from fczoo.core.registry import METHODS
from fczoo.data.views import ImageStore
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import DTYPES, pick_device
from fczoo.federation.environment import hardware, peak_memory, versions
from fczoo.testing.toy_benchmark import small_method, toy_bench

HERE = Path(__file__).parent
ROUNDING = 1e-6  # of a tensor's largest entry, in float64 after two epochs
SMALLER: dict[str, dict[str, Any]] = {"glfc": {"inversion_steps": 1, "inversion_inner": 2}}
SMALL_STEPS = (
    "--methods hgp --backbones vit_nano_32 --precisions fp32 --together 1 --batch-size 4 --steps 2 "
    "--repeats 1"
)
SMALL_RUN = (
    "--dataset digits --tasks 2 --clients 2 --rounds 1 --epochs 1 --train-per-class 4 "
    "--test-per-class 2"
)
WHOLE_RUN = "--protocol hgp --dataset cifar100 --seeds 0"

Row = dict[str, Any]


def on_device(bench: Benchmark, device: torch.device, dtype: torch.dtype) -> Benchmark:
    """Return the benchmark with its backbone and images on a device."""
    backbone = bench.backbone.to(device, dtype)
    train, test = (
        ImageStore(images, backbone) for images in (bench.stream.train, bench.stream.test)
    )
    return replace(bench, backbone=backbone, train=train, test=test)


def largest_difference(cpu: list[Payload], device: list[Payload]) -> float:
    """Return the largest difference in a tensor of the uploads, relative to its largest entry."""
    gaps = [0.0]
    for a, b in zip(cpu, device, strict=True):
        if a.keys() != b.keys():
            raise ValueError(
                f"client {a.client} sends {sorted(a)} from the CPU, {sorted(b)} from the device"
            )
        for name, value in a.items():
            if value.numel():
                gap = (value.double() - b[name].cpu().double()).abs().max()
                gaps.append(float(gap / value.abs().max().clamp(min=1e-12)))
    return max(gaps)


class Replay:
    """Repetition of a CPU run's exchanges on a device, with the differences of the uploads."""

    def __init__(self, bench: Benchmark):
        self.bench, self.gaps = bench, list[float]()
        self.memories: dict[int, Tree] = {}  # what the clients on the device remember

    def run(self, method: Method, bench: Benchmark) -> float:
        """Run the method on the CPU; return the largest difference of the uploads."""
        train, collect = ClientEngine.train, ClientEngine.collect

        def train_twice(
            engine: ClientEngine, state: Tree, clients: Any, ctx: Context, *callback: Any
        ) -> list[Payload]:
            device_ctx = replace(ctx, shared=self._to_device(ctx.shared))
            device_uploads = train(
                self._engine(engine), self._to_device(state), clients, device_ctx
            )
            return self._compare(train(engine, state, clients, ctx, *callback), device_uploads)

        def collect_twice(
            engine: ClientEngine, phase: Any, state: Tree, clients: Any, ctx: Context
        ) -> list[Payload]:
            device_uploads = list(
                collect(self._engine(engine), phase, self._to_device(state), clients, ctx)
            )
            return self._compare(list(collect(engine, phase, state, clients, ctx)), device_uploads)

        with mock.patch.multiple(ClientEngine, train=train_twice, collect=collect_twice):
            bench.run(method)
        return max(self.gaps)

    def _engine(self, engine: ClientEngine) -> ClientEngine:
        return ClientEngine(
            engine.method, self.bench.backbone, self.bench.train, engine.plan, self.memories, {}
        )

    def _to_device(self, tree: Tree) -> Tree:
        return {name: value.to(self.bench.backbone.device) for name, value in tree.items()}

    def _compare(self, cpu: list[Payload], device: list[Payload]) -> list[Payload]:
        self.gaps.append(largest_difference(cpu, device))
        return cpu


class KillError(Exception):
    """Exception that ends a run as if its process had been killed."""


def kill() -> None:
    """End the run."""
    raise KillError


def same_numbers(names: list[str], device: torch.device) -> list[Row]:
    """Return one row per method: the difference of the device's uploads from the CPU's."""
    rows = []
    for name in names:
        for together in (1, 3):
            bench = toy_bench(together=together)
            gap = Replay(on_device(bench, device, torch.float64)).run(method_of(name), bench)
            rows.append(
                {"method": name, "together": together, "difference": gap, "ok": gap <= ROUNDING}
            )
    return rows


def whole_runs(names: list[str], device: torch.device) -> list[Row]:
    """Return one row per method and precision.

    It has accuracy, memory, and whether a killed run ends alike.
    """
    rows = []
    for name in names:
        for together, precision in ((1, "fp64"), (3, "fp64"), (3, "bf16")):
            settings = {"attack": "gaussian:1", "attackers": 0.34, "together": together}
            bench = on_device(toy_bench(**settings), device, DTYPES[precision])
            begin = time.perf_counter()
            result = bench.run(method_of(name))
            row = {"method": name, "together": together, "precision": precision, **result.metrics}
            row |= {"seconds": time.perf_counter() - begin}
            row |= {f"MiB, {kind}": size / 2**20 for kind, size in peak_memory(device).items()}
            rows.append(
                {**row, "ok": precision == "bf16" or resume_killed(bench, name) == result.accuracy}
            )
    return rows


def resume_killed(bench: Benchmark, name: str) -> list[list[float]]:
    """Return accuracies of the run that is killed after its first round and continues."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        try:
            bench.run(method_of(name), checkpoint=Checkpoint(path, kill))
        except KillError:
            return bench.run(method_of(name), checkpoint=Checkpoint(path)).accuracy
    raise AssertionError("the run ended before it saved anything")


def method_of(name: str) -> Method:
    """Create a method with few steps."""
    return small_method(name, **SMALLER.get(name, {}))


def command(*words: str) -> bool:
    """Run a command with its output shown; return whether it succeeded."""
    print("$", *words, flush=True)
    return subprocess.run(words).returncode == 0


def table(
    part: Callable[[list[str], torch.device], list[Row]], names: list[str], device: torch.device
) -> list[Row]:
    """Run a part and print its table."""
    rows = part(names, device)
    print(tabulate(rows, "keys", floatfmt=".3g"), flush=True)
    return rows


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--methods", help="Of parts 1 and 2, separated by commas.  [all]")
@click.option(
    "--data-root", type=click.Path(file_okay=False, path_type=Path), help="Folder with CIFAR-100."
)
@click.option(
    "--small",
    is_flag=True,
    help="The shortest steps, and a tiny run of HGP on digits, to try the script.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(device: str, methods: str | None, data_root: Path | None, small: bool, out: Path) -> None:
    """Run all parts and print which failed."""
    torch_device = pick_device(device)
    names = methods.split(",") if methods else METHODS.names()
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions()}
    print(json.dumps(report), flush=True)
    parts: dict[str, bool] = {}
    for title, part in (("same numbers", same_numbers), ("whole runs", whole_runs)):
        print(f"\n{title}", flush=True)
        report[title] = table(part, names, torch_device)
        parts[title] = all(row["ok"] for row in report[title])
    print("\nsteps", flush=True)
    steps = [
        *(SMALL_STEPS.split() if small else ()),
        "--device",
        device,
        "--out",
        str(out / "step.json"),
    ]
    parts["steps"] = command(sys.executable, str(HERE / "step.py"), *steps)
    print("\nHGP", flush=True)
    if small or data_root:
        schedule = [
            *(SMALL_RUN if small else WHOLE_RUN).split(),
            "--methods",
            "hgp",
            "--device",
            device,
        ]
        data = ["--data-root", str(data_root)] if data_root else []
        bench = [
            sys.executable,
            "-m",
            "fczoo",
            "bench",
            *schedule,
            *data,
            "--out",
            str(out / "hgp"),
        ]
        parts["HGP"] = command(*bench)
    else:
        print("left out; it needs --data-root")
    report["parts"] = parts
    (out / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{tabulate([[k, 'ok' if ok else 'FAILED'] for k, ok in parts.items()])}")
    sys.exit(sum(not ok for ok in parts.values()))


if __name__ == "__main__":
    main()
