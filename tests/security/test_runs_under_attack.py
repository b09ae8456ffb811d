"""Runs continue if a hostile client spoils the state; honest divergence ends a run."""

import logging

import pytest
import torch

from fczoo.core.errors import FczooError
from fczoo.core.registry import METHODS
from fczoo.testing.method_under_test import SHORT
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_methods import quick_method

UNDER_ATTACK = {"attackers": 0.34, "rounds": 1}


@pytest.mark.parametrize(
    ("name", "seed", "settings", "remark"),
    [
        # the flow of two uploads, whose median is their mean, makes features that overflow
        (
            "affcl",
            0,
            {"attack": "scale:1000", "aggregator": "median"},
            "1 exchange with fewer than 1 valid upload: the state did not change",
        ),
        # the server's generator learns from a model that overflows
        (
            "mfcl",
            0,
            {"attack": "scale:1000", "aggregator": "median"},
            "1 exchange with a merge that is not finite: the state did not change",
        ),
        # only two clients have images of the second task
        (
            "fedavg",
            0,
            {"attack": "sign-flip:5", "aggregator": "trimmed_mean:1"},
            "1 exchange with too few uploads for trimmed_mean:1: the state did not change",
        ),
        (
            "fedavg",
            0,
            {"attack": "sign-flip:5", "aggregator": "krum:0"},
            "1 exchange with too few uploads for krum:0: the state did not change",
        ),
    ],
)
def test_attack_does_not_end_run(name, seed, settings, remark, caplog):
    bench = toy_bench(torch.float32, **UNDER_ATTACK, **settings)
    with caplog.at_level(logging.WARNING, "fczoo"):
        result = bench.run(small_method(name), seed)
    assert len(result.accuracy) == 3
    assert result.remark.endswith(remark)
    (skipped,) = result.skipped
    about = f"task {skipped['task'] + 1}, round {skipped['moment'] + 1}"
    assert f"{skipped['reason']} in {about}; the state does not change" in caplog.text


def test_diverged_clients_are_listed():
    bench = toy_bench(torch.float32, attack="scale:1000", aggregator="median", **UNDER_ATTACK)
    result = bench.run(small_method("affcl"), 0)
    reasons = {r["client"]: r["reason"] for r in result.rejected if r["task"] == 2}
    assert reasons == dict.fromkeys(range(3), "diverged, loss nan")


def test_divergence_and_too_few_uploads_end_honest_run():
    with pytest.raises(FczooError, match="task 1, round 1: 0 of 3 uploads are valid"):
        toy_bench(torch.float32, rounds=2).run(small_method("fedavg", tune="full", lr=1e30))
    with pytest.raises(FczooError, match="trimmed_mean:1 needs at least 3 uploads and got 2"):
        toy_bench(aggregator="trimmed_mean:1", rounds=1).run(small_method("fedavg"))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["scale:1000", "gaussian:1000"])
@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_finishes_under_attack(name, attack):
    bench = toy_bench(torch.float32, attack=attack, **UNDER_ATTACK, **SHORT)
    method = quick_method(name)
    try:
        bench.check(method)
    except FczooError as error:
        pytest.skip(str(error))
    assert len(bench.run(method, 1).accuracy) == 3
