"""Kill real runs at random moments, run the same command again, and compare with an unhurt run.

    python benchmarks/crashes.py --trials 10

Every trial is one run of ``fczoo bench`` in a separate process (forked, so that it starts at
once). A fault hits it at a moment drawn over the length of an unhurt run; then the same command
runs again until it ends well. A trial survives when every file equals the unhurt run's byte by
byte, with times, memory and the command line left out. Linux only.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

from tabulate import tabulate

SIZE = {
    "rounds": 3,
    "epochs": 1,
    "tasks": 3,
    "clients": 3,
    "train-per-class": 16,
    "test-per-class": 4,
}
ASIDE = {
    "sha256",
    "seconds",
    "peak MB",
    "peak_memory",
    "phases",
    "command",
    "started",
    "bytes_per_second",
}
IGNORED_FILES = (".lock", "filler", "log.txt")  # the log has the time of every line
DISK = 64_000_000  # bytes of the small file system


def bench(method, out, log):
    """Run ``fczoo bench`` in the child process."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fczoo.cli.app import main

    size = [f"--{name}={value}" for name, value in SIZE.items()]
    main(["bench", "--methods", method, *size, "--device", "cpu", "--out", str(out)])


def start(method, out, log):
    """Start a run in a child process."""
    process = multiprocessing.get_context("fork").Process(target=bench, args=(method, out, log))
    process.start()
    return process


def read_contents(folder):
    """Return the contents of a run folder by file, without times."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in IGNORED_FILES:
            content = path.read_bytes()
            if path.suffix == ".json":
                content = without_times(json.loads(content))
            elif path.suffix == ".jsonl":
                content = [without_times(json.loads(line)) for line in content.splitlines()]
            elif path.name.startswith("summary"):
                content = path.name  # tables of what the JSON files hold, with a time in every row
            contents[str(path.relative_to(folder))] = content
    return contents


def without_times(tree):
    """Remove times, memory and the command from JSON."""
    if isinstance(tree, dict):
        return {k: without_times(v) for k, v in tree.items() if k not in ASIDE}
    return [without_times(v) for v in tree] if isinstance(tree, list) else tree


def fill(folder):
    """Leave no free byte on the file system of ``folder``."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (65536, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue


def limit_memory(pid):
    """Limit the address space of a process to its present size."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(
        pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY)
    )


FAULTS = {
    "SIGKILL": lambda pid, folder: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid, folder: os.kill(pid, signal.SIGTERM),
    "SIGINT": lambda pid, folder: os.kill(pid, signal.SIGINT),
    "SIGINT twice": lambda pid, folder: (
        os.kill(pid, signal.SIGINT),
        time.sleep(0.05),
        os.kill(pid, signal.SIGINT),
    ),
    "file size limit": lambda pid, folder: resource.prlimit(
        pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)
    ),
    "memory limit": lambda pid, folder: limit_memory(pid),
    "full disk": lambda pid, folder: fill(folder),
}


@contextmanager
def open_folder(small):
    """Yield a temporary folder, on a separate file system of ``DISK`` bytes if it is ``small``."""
    folder = Path(tempfile.mkdtemp(prefix="crashes-"))
    if small:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
        )
    try:
        yield folder
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(folder)


def try_fault(method, fault, delay, expected):
    """Return the first attempt's exit code, the number of attempts, and the files that differ."""
    with open_folder(small=fault == "full disk") as folder:
        out, log = folder / "run", Path(tempfile.gettempdir()) / f"crashes-{os.getpid()}.log"
        process = start(method, out, log)
        time.sleep(delay)
        if process.is_alive():
            with suppress(ProcessLookupError, FileNotFoundError):  # it may end this very moment
                FAULTS[fault](process.pid, folder)
        process.join()
        first, attempts = process.exitcode, 1
        (folder / "filler").unlink(missing_ok=True)
        while process.exitcode != 0 and attempts < 4:
            process = start(method, out, log)
            process.join()
            attempts += 1
        if "Traceback" in log.read_text():
            print(log.read_text(), file=sys.stderr)
        log.unlink()
        contents = read_contents(out)
        names = sorted(contents.keys() | expected.keys())
        different = [name for name in names if contents.get(name) != expected.get(name)]
        return first, attempts, different


def can_mount():
    """Return whether this process may mount a file system."""
    try:
        with open_folder(small=True):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def main():
    """Try every fault and print how many runs survived it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="hgp,pilora,fppl,fcilpt,fedncm")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument(
        "--trials", type=int, default=10, help="of every fault, spread over the methods"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import fczoo.runner.sweep  # noqa: F401 - imported here so that the children start at once
    from fczoo.core.registry import AGGREGATORS, DATASETS, METHODS, PARTITIONERS

    for registry in (AGGREGATORS, DATASETS, METHODS, PARTITIONERS):
        registry.names()

    rng, methods, rows = random.Random(options.seed), options.methods.split(","), []
    expected, length = {}, {}
    for method in methods:
        with open_folder(small=False) as folder:
            begin = time.perf_counter()
            process = start(method, folder / "run", folder / "log")
            process.join()
            assert process.exitcode == 0, (folder / "log").read_text()
            length[method] = time.perf_counter() - begin
            expected[method] = read_contents(folder / "run")
    faults = [f for f in options.faults.split(",") if f != "full disk" or can_mount()]
    for fault in faults:
        codes, failures, attempts = Counter(), [], 0
        for i in range(options.trials):
            method = methods[i % len(methods)]
            first, tries, different = try_fault(
                method, fault, rng.uniform(0, length[method]), expected[method]
            )
            codes[first] += 1
            attempts = max(attempts, tries)
            if different:
                failures.append((method, different))
        hit = options.trials - codes[0]
        exits = ", ".join(f"{c}: {n}" for c, n in sorted(codes.items()))
        rows.append([fault, options.trials, hit, options.trials - len(failures), attempts, exits])
        for method, different in failures:
            print(f"{fault}: {method} differs in {', '.join(different)}", file=sys.stderr)
    print(
        tabulate(
            rows, ["fault", "tried", "ended the run", "survived", "most attempts", "exit codes"]
        )
    )
    if "full disk" in options.faults and "full disk" not in faults:
        print("full disk: not tried, this system lets no one mount a small file system")
    sys.exit(any(row[1] != row[3] for row in rows))


if __name__ == "__main__":
    main()
