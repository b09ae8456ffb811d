"""Measure the cost of storing the models of runs: seconds relative to the run, and bytes.

    python benchmarks/keep_model.py --methods fedavg,hgp,fedncm

Each method runs on a data set, without keeping. Its model is then saved several times, and the
median is compared with the seconds of the run. Bytes of ``model.safetensors`` are compared with
those of the tensors that prediction reads.
"""

import statistics
import tempfile
import time
from pathlib import Path

import click
from tabulate import tabulate

from fczoo import Benchmark, Settings, save_model
from fczoo.core.registry import METHODS
from fczoo.core.tree import nbytes
from fczoo.federation.model_record import SERVER_STATE, TENSORS
from fczoo.federation.run import FederatedRun
from fczoo.models.classifier import prediction_tensors


@click.command()
@click.option("--methods", default="fedavg,hgp,fedncm", show_default=True, help="Names, or all.")
@click.option("--dataset", default="digits", show_default=True)
@click.option("--train-per-class", type=int, help="Training images per class.  [default: all]")
@click.option("--rounds", default=2, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Times that a model is saved.")
def main(
    methods: str, dataset: str, train_per_class: int | None, rounds: int, repeats: int
) -> None:
    """Print seconds of a run, seconds and share of storing its model, and bytes."""
    settings = Settings.for_dataset(
        dataset, rounds=rounds, train_per_class=train_per_class, device="cpu"
    )
    bench, rows = Benchmark.open(settings), []
    for name in METHODS.names() if methods == "all" else methods.split(","):
        run = bench.start(name)
        if run.method.training().own_models:
            continue
        run.run()
        rows.append([name, *measure(run, repeats)])
    head = ["method", "run, s", "keeping, s", "share, %", "model, bytes", "of what is read", "rest"]
    print(tabulate(rows, head, disable_numparse=True))


def measure(run: FederatedRun, repeats: int) -> list[str]:
    """Save the model of a run several times; return the cells of its row."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            start = time.perf_counter()
            save_model(Path(folder, str(number)), run)
            seconds.append(time.perf_counter() - start)
        model, rest = Path(folder, "0", TENSORS), Path(folder, "0", SERVER_STATE)
        size = model.stat().st_size
        rest_size = rest.stat().st_size if rest.is_file() else 0
    read = prediction_tensors(run.method, run.backbone, run.state, run.stream.tasks[-1])
    keeping = statistics.median(seconds)
    return [
        f"{run.result.seconds:.1f}",
        f"{keeping:.3f}",
        f"{100 * keeping / run.result.seconds:.2f}",
        f"{size:,}",
        f"x{size / nbytes(read):.3f}",
        f"{rest_size:,}",
    ]


if __name__ == "__main__":
    main()
