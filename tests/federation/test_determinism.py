"""The same seed gives the same numbers: bit for bit, or within tolerances if sums are reordered.

Batched clients are part of ``test_conformance.py``, resumed and deterministic runs of
``test_every_method.py``.
"""

import math

import torch

from fczoo import Benchmark, Settings, create_method
from fczoo.federation.callbacks import Callback

# relative, in float32: threads split sums, and Adam turns the last bit of a tiny gradient into more
THREADS = 1e-4


class Losses(Callback):
    def __init__(self):
        self.values = []

    def round(self, record):
        self.values.append(record["loss"])


def train_run(bench, method, threads: int = 1):
    log, thread_count = Losses(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return bench.run(method, 0, log).accuracy, log.values
    finally:
        torch.set_num_threads(thread_count)


def test_two_threads_match_one():
    """Compare the numbers of two threads with those of one.

    The bundled backbone has products large enough for torch to split them.
    """
    small = {
        "tasks": 2,
        "clients": 2,
        "rounds": 1,
        "epochs": 1,
        "train_per_class": 4,
        "test_per_class": 2,
        "device": "cpu",
    }
    bench = Benchmark.open(Settings.for_dataset("digits", **small))
    one, two = (train_run(bench, create_method("pilora", "digits"), threads) for threads in (1, 2))
    assert all(math.isclose(a, b, rel_tol=THREADS) for a, b in zip(one[1], two[1], strict=True))
    assert all(
        abs(a - b) <= 5
        for first, second in zip(one[0], two[0], strict=True)
        for a, b in zip(first, second, strict=True)
    )  # one image of 20


def test_deterministic_setting_enables_algorithms(make_bench, small_method, monkeypatch):
    flags = []
    monkeypatch.setattr(
        type(small_method("fedncm")),
        "update_from",
        lambda self, phase, state, sums, task: flags.append(flag()) or dict(state),
    )
    flag = torch.are_deterministic_algorithms_enabled
    for deterministic in (True, False):
        make_bench(deterministic=deterministic).run(small_method("fedncm"))
    assert flags == [True] * 3 + [False] * 3
