"""Kill server or sites of real federations, restart them, and compare with undisturbed ones.

    python benchmarks/crashes_of_sites.py --trials 10

A federation is a server and three sites over TLS, each in a separate process. SIGKILL hits random
members at ``--kills`` random times within the duration of an undisturbed federation; killed members
restart. A federation survives if no process prints a traceback, the federation ends, and its
results and models equal the undisturbed one's byte by byte, without times. Linux only.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

from crashes import read_contents
from tabulate import tabulate

from fczoo.sites.credentials import write_federation
from fczoo.sites.federation_config import write_agreement

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from helpers_site_folders import SETTINGS, TASKS, write_images  # noqa: E402
from helpers_sites import NAMES, free_port  # noqa: E402

MEMBERS = ("server", *NAMES)
LONGEST = 300.0  # seconds that a federation may take


def take_part(federation, images, log):
    """Execute ``fczoo site start`` in the child process."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fczoo.cli.app import main

    main(["site", "start", str(federation), "--images", str(images), "--patience", "120"])


def start(member: str, folder: Path) -> BaseProcess:
    """Start the server or a site in a child process."""
    images = folder / "data" / ("test" if member == "server" else member)
    arguments = (folder / "federation" / member, images, folder / "log")
    process = multiprocessing.get_context("fork").Process(target=take_part, args=arguments)
    process.start()
    return process


def run(method: str, kills: list[tuple[float, str]]):
    """Run a federation in which members are killed at given times in seconds.

    Return what its files hold, the seconds, the exit codes of killed members, and what is wrong.
    """
    folder, codes, problems = Path(tempfile.mkdtemp(prefix="crashes-")), Counter(), []
    write_images(folder / "data")
    write_agreement(folder / "agreed", method, NAMES, TASKS, SETTINGS)
    write_federation(folder / "federation", folder / "agreed", "localhost", free_port())
    processes = {member: start(member, folder) for member in MEMBERS}
    begin = time.perf_counter()
    for moment, member in sorted(kills):
        time.sleep(max(0.0, begin + moment - time.perf_counter()))
        if processes[member].is_alive():
            os.kill(processes[member].pid, signal.SIGKILL)
        processes[member].join()
        codes[processes[member].exitcode] += 1
        if processes[member].exitcode != 0:
            processes[member] = start(member, folder)
    for member, process in processes.items():
        process.join(max(0.0, begin + LONGEST - time.perf_counter()))
        if process.exitcode != 0:
            problems.append(f"{member} ends with {process.exitcode}")
            process.kill()
    seconds, log = time.perf_counter() - begin, (folder / "log").read_text()
    if problems or "Traceback" in log:
        print(log, file=sys.stderr)
        problems += ["a traceback"] if "Traceback" in log else []
    contents = {
        f"{member}/{name}": content
        for member in MEMBERS
        for name, content in read_contents(folder / "federation" / member).items()
        if name == "result.json" or name.startswith("model/")
    }
    shutil.rmtree(folder)
    return contents, seconds, codes, problems


def main():
    """Kill members of federations and print how many federations survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="hgp,fedavg,fedncm")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--kills", type=int, default=2, help="in each trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import fczoo.sites.node  # noqa: F401 - imported here so that the children start at once

    rng, expected, failures, codes = random.Random(options.seed), {}, [], Counter()
    methods = options.methods.split(",")
    for trial in range(options.trials):
        method = methods[trial % len(methods)]
        if method not in expected:
            contents, length, _, problems = run(method, [])
            assert not problems, problems
            expected[method] = contents, length
        contents, length = expected[method]
        kills = [(rng.uniform(0, length), rng.choice(MEMBERS)) for _ in range(options.kills)]
        found, _, exits, problems = run(method, kills)
        names = sorted(contents.keys() | found.keys())
        problems += [name for name in names if contents.get(name) != found.get(name)]
        codes += exits
        moments = ", ".join(f"{member} after {moment:.1f} s" for moment, member in sorted(kills))
        print(f"{method}: {moments}: {problems or 'survived'}", file=sys.stderr, flush=True)
        failures += problems and [method]
    exits = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    row = [options.trials, codes[-signal.SIGKILL], options.trials - len(failures), exits]
    print(tabulate([row], ["federations", "kills", "survived", "exit codes"]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
