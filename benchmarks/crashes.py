"""Kill real runs at random times, repeat the command, and compare with an undisturbed run.

    python benchmarks/crashes.py --trials 10
    python benchmarks/crashes.py --runs scaffold,together,tune --faults SIGKILL

Each trial is one command in a forked process, which starts fast: ``fczoo bench`` with a method, or
one of ``COMMANDS``. A fault occurs at a random time within the duration of an undisturbed run; then
the same command is repeated until it succeeds. The fault ``file operation`` is SIGKILL just before
a random operation that opens, renames or removes a file of the run. A run survives if no process
prints a traceback and every file equals the undisturbed run's byte by byte, without times, memory
and the command line. Linux only.
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
COMMANDS = {
    "diagnostics": "bench --methods fedavg --diagnostics",
    "together": "bench --methods hgp --together 3",
    "scaffold": "bench --methods fedavg --local scaffold --attack sign-flip:2 --attackers 0.34",
    "jobs": "bench --methods fedncm,hgp --jobs 2",
    "ray": "bench --methods fedncm,hgp --executor ray --jobs 2",
    "tune": "tune --methods fedavg --trials 3",
}
"""Runs that are more than one method, by name."""
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
# the log has the time of every line, the database of a search that of every trial
IGNORED_FILES = (".lock", "filler", "log.txt", "fedavg.db")
CONCURRENT, FILE_OPERATION = "the same command meanwhile", "file operation"
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
DISK = 64_000_000  # bytes of the small file system


def count_operations(folder, operations, last):
    """Count the operations on files of a folder; SIGKILL hits before number ``last``."""

    def count(event, arguments):
        if event in FILE_EVENTS and os.fsdecode(str(arguments[0])).startswith(str(folder)):
            operations.value += 1
            if operations.value == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def command(run, out, log, operations, last):
    """Execute the command of a run in the child process."""
    if operations:
        count_operations(out, operations, last)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fczoo.cli.app import main

    size = [f"--{name}={value}" for name, value in SIZE.items()]
    words = COMMANDS.get(run, f"bench --methods {run}").split()
    main([*words, *size, "--device", "cpu", "--out", str(out)])


def start(run, out, log, operations=None, last=0):
    """Start a run in a child process."""
    arguments = (run, out, log, operations, last)
    process = multiprocessing.get_context("fork").Process(target=command, args=arguments)
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
    """Fill the file system of ``folder``."""
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


def move(folder, replace):
    """Move the run folder away; ``replace`` puts an empty one in its place."""
    (folder / "run").rename(folder / "moved")
    if replace:
        (folder / "run").mkdir()


FAULTS = {
    "SIGKILL": lambda pid, folder: os.kill(pid, signal.SIGKILL),
    "SIGTERM": lambda pid, folder: os.kill(pid, signal.SIGTERM),
    "SIGINT": lambda pid, folder: os.kill(pid, signal.SIGINT),
    "SIGHUP": lambda pid, folder: os.kill(pid, signal.SIGHUP),
    "SIGQUIT": lambda pid, folder: os.kill(pid, signal.SIGQUIT),
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
    "folder moved": lambda pid, folder: move(folder, replace=False),
    "folder replaced": lambda pid, folder: move(folder, replace=True),
    CONCURRENT: lambda pid, folder: None,
    FILE_OPERATION: lambda pid, folder: None,  # the child process hits itself
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


def counter():
    """Return an integer that child processes share."""
    return multiprocessing.get_context("fork").Value("i", 0)


def try_fault(run, fault, delays, expected):
    """Return the first attempt's exit code, the number of attempts, and what is wrong.

    The fault hits the first attempt after the first delay, the next one after the next, and so on.
    Delays of ``file operation`` are numbers of operations.
    """
    at_file = fault == FILE_OPERATION

    def attempt(delay):
        process = start(run, out, log, counter() if at_file else None, int(delay))
        process.join(None if at_file else delay)
        if process.is_alive():
            with suppress(ProcessLookupError, FileNotFoundError):  # it may end this very moment
                FAULTS[fault](process.pid, folder)
        return process

    with open_folder(small=fault == "full disk") as folder:
        out, log = folder / "run", Path(tempfile.gettempdir()) / f"crashes-{os.getpid()}.log"
        process = attempt(delays[0])
        other = start(run, out, log) if fault == CONCURRENT and process.is_alive() else None
        process.join()
        if other:
            other.join()
        first, attempts = process.exitcode, 1
        (folder / "filler").unlink(missing_ok=True)
        in_place = first == 0 and (out / "bench.json").is_file()  # moved before it had any file
        if (folder / "moved").is_dir() and not in_place:
            shutil.rmtree(out, ignore_errors=True)
            (folder / "moved").rename(out)
        while process.exitcode != 0 and attempts < 3 + len(delays):
            hit = attempts < len(delays)
            process = attempt(delays[attempts]) if hit else start(run, out, log)
            process.join()
            attempts += 1
        problems = []
        if "Traceback" in log.read_text():
            print(log.read_text(), file=sys.stderr)
            problems.append("a traceback")
        log.unlink()
        contents = read_contents(out)
        names = sorted(contents.keys() | expected.keys())
        problems += [name for name in names if contents.get(name) != expected.get(name)]
        return first, attempts, problems


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
    parser.add_argument(
        "--runs",
        default="hgp,pilora,fppl,fcilpt,fedncm",
        help=f"methods, or of {', '.join(COMMANDS)}",
    )
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument(
        "--trials", type=int, default=10, help="of every fault, spread over the runs"
    )
    parser.add_argument(
        "--again", type=float, default=0.0, help="share of runs whose second attempt is hit, too"
    )
    parser.add_argument(
        "--within", type=float, default=1.0, help="part of an unhurt run's time in which faults hit"
    )
    parser.add_argument("--rounds", type=int, default=SIZE["rounds"], help="of every task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    SIZE["rounds"] = options.rounds
    import fczoo.runner.sweep  # noqa: F401 - imported here so that the children start at once
    from fczoo.core.registry import AGGREGATORS, DATASETS, METHODS, PARTITIONERS

    for registry in (AGGREGATORS, DATASETS, METHODS, PARTITIONERS):
        registry.names()

    rng, runs, rows = random.Random(options.seed), options.runs.split(","), []
    expected, length, operations = {}, {}, {}
    for run in runs:
        with open_folder(small=False) as folder:
            begin, count = time.perf_counter(), counter()
            process = start(run, folder / "run", folder / "log", count)
            process.join()
            assert process.exitcode == 0, (folder / "log").read_text()
            length[run], operations[run] = time.perf_counter() - begin, count.value
            expected[run] = read_contents(folder / "run")
    faults = [f for f in options.faults.split(",") if f != "full disk" or can_mount()]
    for fault in faults:
        codes, failures, attempts = Counter(), [], 0
        for i in range(options.trials):
            run = runs[i % len(runs)]
            hits = 2 if rng.random() < options.again else 1
            delays = [rng.uniform(0, options.within * length[run]) for _ in range(hits)]
            if fault == FILE_OPERATION:
                delays = [rng.randint(1, operations[run]) for _ in range(hits)]
            first, tries, problems = try_fault(run, fault, delays, expected[run])
            codes[first] += 1
            attempts = max(attempts, tries)
            moments = " and ".join(f"{delay:.1f}" for delay in delays)
            unit = "operations" if fault == FILE_OPERATION else "s"
            print(f"{fault}: {run} after {moments} {unit}: {first}", file=sys.stderr, flush=True)
            if problems:
                failures.append((run, problems))
        hit = options.trials - codes[0]
        exits = ", ".join(f"{c}: {n}" for c, n in sorted(codes.items()))
        rows.append([fault, options.trials, hit, options.trials - len(failures), attempts, exits])
        for run, problems in failures:
            print(f"{fault}: {run}: {', '.join(problems)}", file=sys.stderr, flush=True)
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
