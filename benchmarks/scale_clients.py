"""A run with many clients, of whom ten take part in a round: what ``scale.py clients`` asks of one
process.

    python benchmarks/scale_clients.py 10000 100

However many clients there are, each owns four images of every task, drawn from the same 32, so that
participants have the same work: a linear head on frozen features of a small ViT with random
weights. Times are the processor's, so that other work next to counts little. Prints JSON.
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
from fczoo.testing.world import toy_backbone

PARTICIPANTS, EACH, IMAGES, ROUNDS = 10, 4, 32, 4


class Watched(RoundWriter):
    """Notes how long each round took from the one before, all that a round entails included."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.seconds: list[list[float]] = []
        self.last = 0.0

    def round(self, record):
        super().round(record)
        now = time.process_time()
        if record["round"]:  # the first one has the task's beginning with it
            self.seconds[-1].append(now - self.last)
        else:
            self.seconds.append([])
        self.last = now


def stream_of(tasks: int) -> Stream:
    labels = np.repeat(np.arange(tasks), IMAGES)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 3), np.uint8)
    train, names = Images(pixels, labels), tuple(map(str, range(tasks)))
    test = Images(pixels[::IMAGES], labels[::IMAGES])
    ordered = tuple(Task(t, t, t + 1, tasks, tasks) for t in range(tasks))
    return Stream("many", train, test, np.arange(len(labels)), tuple(range(tasks)), names, ordered)


def split(tasks: int, clients: int) -> Partition:
    rng = np.random.default_rng(1)
    owned = (
        ClientIndex(
            np.sort(rng.choice(IMAGES, EACH, replace=False)) + task * IMAGES for _ in range(clients)
        )
        for task in range(tasks)
    )
    return Partition("many", "by hand", 0, tuple(range(tasks)), tuple(owned))


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    clients, tasks = map(int, sys.argv[1:])
    method = create_method("fedavg", tune="head")
    stream, backbone = stream_of(tasks), toy_backbone()
    partition = split(tasks, clients)
    few = {"clients": clients, "tasks": tasks, "rounds": ROUNDS, "epochs": 1, "batch_size": EACH}
    settings = Settings(dataset="many", participation=float(PARTICIPANTS), device="cpu", **few)
    stores = ImageStore(stream.train, backbone), ImageStore(stream.test, backbone)
    bench = Benchmark(settings, stream, partition, backbone, *stores)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving = timed(lambda: partition.save(folder / "partition.json"))
        with Watched(folder) as log:
            seconds = timed(
                lambda: bench.run(method, 0, log, Checkpoint(folder / "checkpoint.safetensors"))
            )
        of_round = [1000 * statistics.median(part) for part in (log.seconds[1], log.seconds[-1])]
        joined = timed(lambda: bench.clients(stream.tasks[-1], idle=True))
        size = (folder / "partition.json").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "run, s": seconds,
        "ms a round, second task": of_round[0],
        "ms a round, last task": of_round[1],
        "ms, a task's clients": 1000 * joined,
        "partition.json, s": saving,
        "partition.json, MB": size / 1e6,
        "peak MiB": peak / 2**20,
    }
    print(json.dumps({name: f"{value:.4g}" for name, value in found.items()}))


if __name__ == "__main__":
    main()
