"""Compare the memory of processes that map pixels and weights with processes that copy them.

    python benchmarks/sharing.py --jobs 1,2,4

A random ViT-B/16 and as many images of 32 pixels as CIFAR-100 has. Each process reads all pixels
and passes one image through all weights, and is then measured: PSS counts shared memory once over
all processes, USS is the memory that one process would free if it ended. Linux only.
"""

import builtins
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch
from loky import ProcessPoolExecutor
from tabulate import tabulate

from fczoo import Benchmark, Settings
from fczoo.core.backbone import Backbone
from fczoo.core.tasks import Task
from fczoo.data.dataset import Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.runner.cost import random_backbone
from fczoo.runner.shared_memory import SharedBenchmark, share


@click.command()
@click.option("--jobs", default="1,2,4", show_default=True, help="Numbers of parallel processes.")
@click.option("--backbone", default="vit_base_patch16_224.augreg_in21k", show_default=True)
@click.option("--images", default=60_000, show_default=True)
def main(jobs: str, backbone: str, images: int) -> None:
    """Print PSS of all processes together and mean USS.

    Copies in each process are measured with the largest number only.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shared_bench = share(synthetic(backbone, images), Path(folder))
        counts = sorted(map(int, jobs.split(",")))
        pools: list[ProcessPoolExecutor] = []
        for is_copy, measured_counts in ((False, counts), (True, counts[-1:])):
            processes: list[int] = []
            for number in range(counts[-1]):
                if number == len(pools):
                    pools.append(ProcessPoolExecutor(1, env={"OMP_NUM_THREADS": "1"}))
                processes.append(pools[number].submit(hold, shared_bench, is_copy).result())
                if len(processes) in measured_counts:
                    sizes = [sizes_of(process) for process in processes]
                    pss, uss = (sum(size) / 2**20 for size in zip(*sizes, strict=True))
                    how = "copied" if is_copy else "mapped"
                    rows.append([len(processes), how, f"{pss:.0f}", f"{uss / len(processes):.0f}"])
        for pool in pools:
            pool.shutdown()
    head = ["processes", "pixels and weights", "PSS of all, MiB", "USS of one, MiB"]
    print(tabulate(rows, head, disable_numparse=True))


def synthetic(backbone: str, images: int) -> Benchmark:
    """Create a benchmark of random weights and pixels."""
    settings = Settings(backbone=backbone, device="cpu", tasks=1)
    frozen, rng = random_backbone(settings), np.random.default_rng(0)
    labels = np.arange(images) % 100
    train = Images(rng.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8), labels)
    names, order = tuple(map(str, range(100))), tuple(range(100))
    stream = Stream(
        "synthetic", train, train, np.arange(images), order, names, (Task(0, 0, 100, 100, 1),)
    )
    stores = (ImageStore(train, frozen), ImageStore(train, frozen))
    return Benchmark(settings, stream, make_partition(stream, "iid", 5), frozen, *stores)


def hold(shared_bench: SharedBenchmark, is_copy: bool) -> int:
    """Open the benchmark, read all of it and keep it; return the id of the process."""
    bench = shared_bench.open()
    if is_copy:
        train = bench.stream.train._replace(pixels=np.array(bench.stream.train.pixels))
        frozen = Backbone(bench.backbone.config, bench.backbone.weights)
        store = ImageStore(train, frozen)
        stream = replace(bench.stream, train=train, test=train)
        bench = replace(bench, stream=stream, backbone=frozen, train=store, test=store)
    bench.stream.train.pixels.sum()
    with torch.no_grad():
        bench.backbone(bench.train.view(torch.arange(1)))
    builtins.held = bench  # a script's functions come to a worker each time with their own globals
    return os.getpid()


def sizes_of(process: int) -> tuple[int, int]:
    """Return PSS and USS of a process in bytes."""
    sizes = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        if name.rstrip(":") in sizes:
            sizes[name.rstrip(":")] += 1024 * int(size)
    return sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"]


if __name__ == "__main__":
    main()
