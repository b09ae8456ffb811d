"""Measure resident memory and disk use over many rounds, which must not grow.

python benchmarks/memory.py --rounds 200 --methods hgp,fcilpt,glfc
"""

import argparse
import resource
import tempfile
from pathlib import Path

from tabulate import tabulate

from fczoo import Benchmark, Settings, create_method
from fczoo.federation.checkpoint import Checkpoint
from fczoo.runner.execute import RoundWriter

SMALL = {
    "tasks": 2,
    "clients": 3,
    "epochs": 1,
    "train_per_class": 8,
    "test_per_class": 4,
    "device": "cpu",
}


class MemoryRecorder(RoundWriter):
    """Writer of rounds that records memory and disk use after each."""

    def start(self, *arguments):
        super().start(*arguments)
        self.resident, self.disk = [], []

    def round(self, record):
        super().round(record)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * resource.getpagesize() / 1e6)
        self.disk.append({p.name: p.stat().st_size for p in self.folder.iterdir()})


def main():
    """Print memory and disk use of each method at five rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, help="over both tasks")
    parser.add_argument("--methods", default="hgp,fcilpt,fedavg")
    options = parser.parse_args()
    rows = []
    bench = Benchmark.open(Settings.for_dataset("digits", rounds=options.rounds // 2, **SMALL))
    for name in options.methods.split(","):
        with tempfile.TemporaryDirectory() as folder, MemoryRecorder(Path(folder)) as log:
            bench.run(
                create_method(name, "digits"),
                0,
                log,
                Checkpoint(Path(folder) / "checkpoint.safetensors"),
            )
        recorded_rounds = [len(log.resident) * part // 20 - 1 for part in (2, 5, 10, 15, 20)]
        checkpoint = max(d.get("checkpoint.safetensors", 0) for d in log.disk)
        resident = [f"{log.resident[i]:.1f}" for i in recorded_rounds]
        per_round = log.disk[-1]["rounds.jsonl"] / len(log.disk)
        rows.append([name, *resident, f"{checkpoint / 1e6:.3f}", f"{per_round:.0f}"])
    rounds = [f"MB at round {i + 1}" for i in recorded_rounds]
    header = ["method", *rounds, "checkpoint MB, at most", "log bytes per round"]
    print(tabulate(rows, header, disable_numparse=True))


if __name__ == "__main__":
    main()
