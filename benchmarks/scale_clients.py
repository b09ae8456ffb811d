"""Run rounds of ten participants among many clients, in one process of ``scale.py clients``.

    python benchmarks/scale_clients.py 10000 100

However many clients there are, each owns four images of every task, drawn from the same 32, so that
participants have the same work: a linear head on frozen features of a small ViT with random
weights. Times are the processor's, so that other work at the same time counts little. The output is
JSON.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fczoo import Benchmark, Settings, create_method
from fczoo.core.tasks import Task
from fczoo.data.client_index import ClientIndex
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.checkpoint import Checkpoint
from fczoo.runner.execute import RoundWriter
from fczoo.testing.toy_benchmark import toy_backbone

PARTICIPANTS, EACH, IMAGES, ROUNDS = 10, 4, 32, 4


class RoundTimer(RoundWriter):
    """Writer of rounds that records the time from one round to the next."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.seconds: list[list[float]] = []
        self.last = 0.0

    def round(self, record):
        super().round(record)
        end = time.process_time()
        if record["round"]:  # the first one has the task's beginning with it
            self.seconds[-1].append(end - self.last)
        else:
            self.seconds.append([])
        self.last = end


def make_stream(tasks: int) -> Stream:
    """Create a stream of one class per task."""
    labels = np.repeat(np.arange(tasks), IMAGES)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 3), np.uint8)
    train, names = Images(pixels, labels), tuple(map(str, range(tasks)))
    test = Images(pixels[::IMAGES], labels[::IMAGES])
    task_list = tuple(Task(t, t, t + 1, tasks, tasks) for t in range(tasks))
    return Stream(
        "many", train, test, np.arange(len(labels)), tuple(range(tasks)), names, task_list
    )


def split(tasks: int, clients: int) -> Partition:
    """Draw four images of every task for each client."""
    rng = np.random.default_rng(1)
    indices = (
        ClientIndex(
            np.sort(rng.choice(IMAGES, EACH, replace=False)) + task * IMAGES for _ in range(clients)
        )
        for task in range(tasks)
    )
    return Partition("many", "by hand", 0, tuple(range(tasks)), tuple(indices))


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Print times and memory of the run as JSON."""
    clients, tasks = map(int, sys.argv[1:])
    method = create_method("fedavg", tune="head")
    stream, backbone = make_stream(tasks), toy_backbone()
    partition = split(tasks, clients)
    sizes = {"clients": clients, "tasks": tasks, "rounds": ROUNDS, "epochs": 1, "batch_size": EACH}
    settings = Settings(dataset="many", participation=float(PARTICIPANTS), device="cpu", **sizes)
    stores = ImageStore(stream.train, backbone), ImageStore(stream.test, backbone)
    bench = Benchmark(settings, stream, partition, backbone, *stores)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving = cpu_seconds(lambda: partition.save(folder / "partition.json"))
        with RoundTimer(folder) as log:
            seconds = cpu_seconds(
                lambda: bench.run(method, 0, log, Checkpoint(folder / "checkpoint.safetensors"))
            )
        round_ms = [1000 * statistics.median(part) for part in (log.seconds[1], log.seconds[-1])]
        listing_seconds = cpu_seconds(lambda: bench.clients(stream.tasks[-1], idle=True))
        size = (folder / "partition.json").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {
        "run, s": seconds,
        "ms per round, second task": round_ms[0],
        "ms per round, last task": round_ms[1],
        "ms, a task's clients": 1000 * listing_seconds,
        "partition.json, s": saving,
        "partition.json, MB": size / 1e6,
        "peak MiB": peak / 2**20,
    }
    print(json.dumps({name: f"{value:.4g}" for name, value in figures.items()}))


if __name__ == "__main__":
    main()
