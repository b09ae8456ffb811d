"""Test fczoo against hostile parties and broken files, and count failures.

    python benchmarks/hostile.py --seed 1

``uploads``: changed uploads of every method reach the server of a simulation. ``sites``: the same
changes reach the server of a federation over TLS with mutual certificates. ``clients``: attacks of
``--attack`` in whole runs, with and without a defence. ``files``: tests that read randomly mutated
files and checkpoints. ``cases``: tests of archives, odd images, weight files with code, and names
with markup. A trial fails if it stops a run, or if a file causes anything but an error of one line.
All runs are in the toy benchmark.
"""

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from tabulate import tabulate

from fczoo.core.errors import FczooError, silence_warnings
from fczoo.core.registry import METHODS
from fczoo.sites.credentials import write_federation
from fczoo.sites.federation_config import check_sites, write_agreement
from fczoo.sites.messages import REFUSAL, UPLOAD, Refusal, UploadInfo, deserialize, serialize
from fczoo.sites.node import ServerLink
from fczoo.sites.transport import ANSWER, KEY, QUESTION, RUN_COMPLETED, RUN_ENDED, SiteListener
from fczoo.testing.hostile_uploads import CHANGES, COUNTS, check_hostile_uploads
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.toy_benchmark import small_method, toy_bench

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from helpers_sites import NAMES, free_port, server_of, sites_of  # noqa: E402

ATTACKS = ("sign-flip:5", "scale:300", "scale:1000", "gaussian:1e6", "scale:1e38", "label-flip")
DEFENCES = {
    "none": {},
    "median": {"aggregator": "median"},
    "norm_clip": {"aggregator": "norm_clip"},
    "trimmed_mean": {"aggregator": "trimmed_mean:1"},
    "outliers": {"outliers": 3.0},
}
FILES = ("end_to_end/test_hostile_files.py", "core/test_json_files.py")
"""Tests that draw files."""
CASES = (
    "data/test_unpack.py",
    "data/test_image_files.py",
    "backbones/test_refused_weights.py",
    "core/test_csv_text.py",
    "reports/test_unusual_folders.py",
)
"""Tests of archives, odd images, weight files with code, and names with markup."""


def try_uploads(methods, trials, seed):
    """Return the trials with changed uploads in a simulation, and the messages of failed ones."""
    failures = []
    for name in methods:
        try:
            check_hostile_uploads(MethodUnderTest(small_method(name)), trials, seed)
        except AssertionError as error:
            failures.append(str(error))
    return trials * len(methods), failures


def changed_answer(answer, rng):
    """Return an answer of a site with a change that no honest site makes, and its name."""
    kind = rng.randrange(10)
    if kind == 0:
        return serialize(REFUSAL, Refusal("no\x1b[2J\ud800" * rng.randrange(9999))), "refusal"
    if kind == 1:
        at = rng.randrange(len(answer))
        return answer[:at] + rng.randbytes(rng.randrange(64)) + answer[at + 1 :], "bytes"
    about, tensors = deserialize(UPLOAD, answer, UploadInfo)
    if kind == 2:
        count = rng.choice(COUNTS)
        fields = {name: getattr(about, name) for name in UploadInfo.__struct_fields__}
        return serialize(
            UPLOAD, UploadInfo(**{**fields, "images": count}), tensors
        ), f"{count} images"
    if not tensors:
        return answer[:-1], "a byte less"
    name, change = rng.choice(list(tensors)), rng.choice(list(CHANGES))
    changed = tensors | {name: CHANGES[change](tensors[name])}
    try:
        return serialize(UPLOAD, about, changed), f"{name} {change}"
    except (ValueError, RuntimeError, NotImplementedError):  # safetensors cannot hold it
        return serialize(UPLOAD, about, {n: v for n, v in tensors.items() if n != name}), "less"


class HostileSite:
    """Site that enrols honestly and then changes most of its answers."""

    def __init__(self, site, rng):
        self.site, self.rng, self.enrolled = site, rng, False
        self.sent = []  # the changes

    def answer(self, question):
        answer = self.site.answer(question)
        if self.enrolled and self.rng.random() < 0.7:
            answer, change = changed_answer(answer, self.rng)
            self.sent.append(change)
        self.enrolled = True
        return answer


def take_part(link, site):
    """Answer the questions of a server until its run ends."""
    while True:
        status, headers, question = link.request(QUESTION, statuses=(200, 204, RUN_ENDED))
        if status == RUN_ENDED:
            return
        if status == 200:
            link.request(f"{ANSWER}/{headers[KEY]}", site.answer(question), (204, 404, 409, 413))


def runs_between_sites(name):
    """Return whether sites can run a method; some need the images of all clients."""
    try:
        check_sites(toy_bench().settings, small_method(name))
    except FczooError:
        return False
    return True


def run_federation(name, rng):
    """Run a method over TLS with a hostile site of three; return its changes and the error."""
    method, bench = small_method(name), toy_bench(torch.float32, rounds=1, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        root, keys, port, error = Path(folder), Path(folder) / "keys", free_port(), ""
        write_agreement(root, "fedncm", list(NAMES), [["a"], ["b"]], {"rounds": 1})
        write_federation(keys, root, "localhost", port)
        listener = SiteListener(keys / "server", NAMES, port, 60.0)
        sites = sites_of(bench, method, root)
        sites[0] = hostile = HostileSite(sites[0], rng)
        links = [ServerLink(keys / NAMES[k], ("localhost", port), 60.0) for k in sites]
        parts = list(zip(links, sites.values(), strict=True))
        threads = [threading.Thread(target=take_part, args=p, daemon=True) for p in parts]
        for thread in threads:
            thread.start()
        try:
            with silence_warnings():
                server_of(bench, method, listener).run()
        except Exception as problem:  # whatever ends a run is a failure
            error = f"{name}: {type(problem).__name__}: {problem}"
        listener.end(RUN_COMPLETED)
        for thread in threads:
            thread.join(30)
        listener.close()
        return hostile.sent, error


def try_sites(methods, trials, seed):
    """Return the number of hostile answers that reached a server over TLS, and the failures."""
    rng, count, failures = random.Random(seed), 0, []
    able = [name for name in methods if runs_between_sites(name)]
    for name in itertools.cycle(rng.sample(able, len(able))):
        if count >= trials:
            break
        sent, error = run_federation(name, rng)
        count += len(sent)
        if error:
            failures.append(f"{error}, after {sent}")
    return count, failures


def try_clients(methods, trials, seed):
    """Return the runs with a hostile client in three, and the failures."""
    rng, count, failures = random.Random(seed), 0, []
    cases = list(itertools.product(methods, ATTACKS, DEFENCES))
    for name, attack, defence in rng.sample(cases, len(cases)):
        if count == trials:
            break
        settings = {"attack": attack, "attackers": 0.34, "rounds": 1, **DEFENCES[defence]}
        bench, method = toy_bench(torch.float32, **settings), small_method(name)
        try:
            bench.check(method)
        except FczooError:  # the method has no use for this defence or attack
            continue
        count += 1
        try:
            with silence_warnings():
                bench.run(method, rng.randrange(99))
        except Exception as error:  # whatever ends a run is a failure
            failures.append(f"{name}, {attack}, {defence}: {type(error).__name__}: {error}")
    return count, failures


def try_files(files, trials):
    """Return the files that tests have drawn, and the failed tests.

    ``trials`` are of each drawing test; each other test is one.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rpfE", "-p", "no:cacheprovider"]
    output = subprocess.run(
        [*command, *(str(TESTS / name) for name in files)],
        cwd=TESTS.parent,
        env={**os.environ, "FCZOO_FUZZ": str(trials)},
        capture_output=True,
        text=True,
    ).stdout
    tests = re.findall(r"^(PASSED|FAILED|ERROR) (.*)", output, re.M)
    drawn = sum("::test_mutated_files" in name or "::test_any_bytes" in name for _, name in tests)
    failures = [name for outcome, name in tests if outcome != "PASSED"]
    return drawn * trials + len(tests) - drawn, failures


def main():
    """Try all kinds and print how many trials of each failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="uploads,sites,clients,files,cases")
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    parser.add_argument("--uploads", type=int, default=100, help="changed uploads per method")
    parser.add_argument("--sites", type=int, default=120, help="hostile answers over TLS")
    parser.add_argument("--clients", type=int, default=58, help="runs with a hostile client")
    parser.add_argument("--files", type=int, default=300, help="mutated files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods, rows, failed = options.methods.split(","), [], 0
    tries = {
        "uploads": lambda: try_uploads(methods, options.uploads, options.seed),
        "sites": lambda: try_sites(methods, options.sites, options.seed),
        "clients": lambda: try_clients(methods, options.clients, options.seed),
        "files": lambda: try_files(FILES, options.files),
        "cases": lambda: try_files(CASES, 1),
    }
    for kind in options.kinds.split(","):
        trials, failures = tries[kind]()
        rows.append([kind, trials, len(failures)])
        failed += len(failures)
        print(f"{kind}: {trials} trials, {len(failures)} failed", file=sys.stderr, flush=True)
        print("\n".join(failures), file=sys.stderr, flush=True)
    print(tabulate(rows, ["kind", "trials", "failed"]))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
