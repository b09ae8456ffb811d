"""Measure the speed-up of workers, and the cost of many clients.

    python benchmarks/scale.py grid --jobs 1,2 --methods hgp --seeds 0-3
    python benchmarks/scale.py round --jobs 1,2 --methods hgp --clients 10 --rounds 4 --tasks 2
    python benchmarks/scale.py clients --numbers 10,100,1000,10000

``grid``: the same runs one after the other and side by side. ``round``: the same rounds in one
process and on workers of a Ray cluster of this machine. ``clients``: rounds of ten participants
among ever more clients, each number in a separate process.

Every run has one thread. Memory is the proportional set size (PSS) of all processes together (only
on Linux): memory that processes share counts once.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from tabulate import tabulate

ANY = {"ignore_unknown_options": True}


@click.group()
def main() -> None:
    """Measure how fczoo scales; MORE arguments go to ``fczoo bench``."""


@main.command(context_settings=ANY)
@click.option("--jobs", default="1,2", show_default=True, help="Numbers of parallel runs.")
@click.option("--methods", default="hgp", show_default=True)
@click.option("--seeds", default="0-3", show_default=True)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def grid(jobs: str, methods: str, seeds: str, more: tuple[str, ...]) -> None:
    """Run the same grid with each number of jobs.

    The column "next to runs" has the time per run in addition to its rounds.
    """
    rows: list[list[object]] = []
    for count in jobs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--methods", methods, "--seeds", seeds, "--jobs", count, *more]
            command = [sys.executable, "-m", "fczoo", "bench", *arguments, "--out", f"{folder}/run"]
            seconds, memory = run_and_measure(command)
            run_seconds = [
                json.loads(f.read_text())["seconds"] for f in Path(folder).rglob("result.json")
            ]
        first = float(str(rows[0][1])) if rows else seconds
        overhead = (seconds * int(count) - sum(run_seconds)) / len(run_seconds)
        figures = (
            f"{seconds:.1f}",
            f"{first / seconds:.2f}",
            f"{overhead:.1f}",
            f"{memory / 2**20:.0f}",
        )
        rows.append([count, *figures])
    head = ["jobs", "seconds", "speed-up", "next to runs, s per run", "peak MiB, all processes"]
    print(tabulate(rows, head, disable_numparse=True))


@main.command("round", context_settings=ANY)
@click.option("--jobs", default="1,2", show_default=True, help="Numbers of workers.")
@click.option("--methods", default="hgp", show_default=True)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def rounds(jobs: str, methods: str, more: tuple[str, ...]) -> None:
    """Measure the median round in one process and with each number of workers.

    The first round is left out.
    """
    rows: list[list[object]] = []
    for count in ("", *jobs.split(",")):
        cluster = (
            ["--executor", "ray", "--cluster", "spread=clients", "--jobs", count] if count else []
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--methods", methods, *more, *cluster, "--out", f"{folder}/run"]
            command = [sys.executable, "-m", "fczoo", "bench", *arguments]
            seconds, memory = run_and_measure(command)
            lines = [
                line
                for f in Path(folder).rglob("rounds.jsonl")
                for line in f.read_text().splitlines()
            ]
        round_seconds = statistics.median(json.loads(line)["seconds"] for line in lines[1:])
        single_seconds = float(str(rows[0][2])) if rows else round_seconds
        figures = (
            f"{seconds:.1f}",
            f"{round_seconds:.2f}",
            f"{single_seconds / round_seconds:.2f}",
            f"{memory / 2**20:.0f}",
        )
        rows.append([f"{count} on Ray" if count else "one process", *figures])
    head = ["workers", "seconds", "seconds per round", "speed-up", "peak MiB, all processes"]
    print(tabulate(rows, head, disable_numparse=True))


@main.command()
@click.option(
    "--numbers", default="10,100,1000,10000", show_default=True, help="Numbers of clients."
)
@click.option("--tasks", default=100, show_default=True)
def clients(numbers: str, tasks: int) -> None:
    """Measure time and memory of rounds with ten participants among growing numbers of clients."""
    script = str(Path(__file__).with_name("scale_clients.py"))
    rows = []
    for number in numbers.split(","):
        command = [sys.executable, script, number, str(tasks)]
        output = subprocess.run(
            command, env=one_thread(), check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        rows.append({"clients": number, **json.loads(output)})
    print(tabulate(rows, headers="keys", disable_numparse=True))


def one_thread() -> dict[str, str]:
    """Return the environment of a process with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_and_measure(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and the peak memory of all its processes in bytes."""
    begin, largest = time.perf_counter(), 0
    with subprocess.Popen(command, env=one_thread(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            largest = max(largest, sum(map(proportional_size, process_tree(process.pid))))
            time.sleep(0.5)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - begin, largest


def process_tree(process: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return [process]
    return [process, *(member for child in children for member in process_tree(int(child)))]


def proportional_size(process: int) -> int:
    """Return the memory of a process in bytes; 0 if it has ended or the system does not report it."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
