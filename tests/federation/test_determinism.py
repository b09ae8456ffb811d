"""The same seed gives the same numbers: bit for bit where nothing differs,
within stated tolerances where sums are ordered otherwise.

Clients together against one by one is part of ``test_conformance.py``,
resumed against unhurt of ``test_resume.py``.
"""

import math

import pytest
import torch

from fczoo import Bench, Settings, create_method
from fczoo.core.registry import METHODS
from fczoo.federation.observer import Silent

THREADS = (
    1e-4  # relative, in float32: threads split sums, and Adam turns the last bit of a tiny gradient into more
)


class Losses(Silent):
    def __init__(self):
        self.values = []

    def round(self, record):
        self.values.append(record["loss"])


def trained(bench, method, threads: int = 1):
    log, before = Losses(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return bench.run(method, 0, log).accuracy, log.values
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", METHODS.names())
def test_a_run_repeats_itself_with_deterministic_operations_only(make_bench, small_method, name):
    small = {"rounds": 1, "epochs": 1}
    plain = trained(make_bench(torch.float32, **small), small_method(name))
    assert trained(make_bench(torch.float32, deterministic=True, **small), small_method(name)) == plain
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_threads_agree_with_one():
    """On the bundled backbone, whose products are large enough for torch to share them out."""
    small = {
        "tasks": 2,
        "clients": 2,
        "rounds": 1,
        "epochs": 1,
        "train_per_class": 4,
        "test_per_class": 2,
        "device": "cpu",
    }
    bench = Bench.open(Settings.for_dataset("digits", **small))
    one, two = (trained(bench, create_method("pilora", "digits"), threads) for threads in (1, 2))
    assert all(math.isclose(a, b, rel_tol=THREADS) for a, b in zip(one[1], two[1], strict=True))
    assert all(
        abs(a - b) <= 5
        for first, second in zip(one[0], two[0], strict=True)
        for a, b in zip(first, second, strict=True)
    )  # one image of 20


def test_deterministic_operations_are_asked_for(make_bench, small_method, monkeypatch):
    seen = []
    monkeypatch.setattr(
        type(small_method("fedncm")),
        "absorb",
        lambda self, moment, state, sums, task: seen.append(flag()) or dict(state),
    )
    flag = torch.are_deterministic_algorithms_enabled
    for wanted in (True, False):
        make_bench(deterministic=wanted).run(small_method("fedncm"))
    assert seen == [True] * 3 + [False] * 3
