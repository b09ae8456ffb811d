"""The same grid of runs one after the other and side by side: seconds, speed-up, memory.

    python benchmarks/scale.py --jobs 1,2 --methods hgp --seeds 0-3

Every run has one thread. Memory is the proportional set size (PSS) of all processes together, Linux alone:
what processes share counts once.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from tabulate import tabulate


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--jobs", default="1,2", show_default=True, help="Numbers of runs side by side.")
@click.option("--methods", default="hgp", show_default=True)
@click.option("--seeds", default="0-3", show_default=True)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def main(jobs: str, methods: str, seeds: str, more: tuple[str, ...]) -> None:
    """Time ``fczoo bench`` with each number of jobs; MORE words go to it."""
    rows: list[list[object]] = []
    for count in jobs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "--methods",
                methods,
                "--seeds",
                seeds,
                "--jobs",
                count,
                *more,
                "--out",
                folder + "/runs",
            ]
            seconds, memory = watched([sys.executable, "-m", "fczoo", "bench", *words])
        first = float(str(rows[0][1])) if rows else seconds
        rows.append([count, f"{seconds:.1f}", f"{first / seconds:.2f}", f"{memory / 2**20:.0f}"])
    print(tabulate(rows, ["jobs", "seconds", "speed-up", "peak MiB, all processes"], disable_numparse=True))


def watched(command: list[str]) -> tuple[float, int]:
    """Seconds that a command took, and the largest memory of its processes together, bytes."""
    begin, largest = time.perf_counter(), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            largest = max(largest, sum(map(proportional_size, family(process.pid))))
            time.sleep(0.5)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - begin, largest


def family(process: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return [process]
    return [process, *(member for child in children for member in family(int(child)))]


def proportional_size(process: int) -> int:
    """Memory of a process, bytes; 0 where it has ended or the system does not say."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
