"""Every method on the pretended device of ``helpers_device``: no mixed devices, few waits."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fczoo import Benchmark, FczooError, Method
from fczoo.core.registry import AGGREGATORS, ATTACKS, METHODS
from fczoo.federation import run
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.diagnostics import Probe
from fczoo.federation.local_trainer import LocalTrainer
from fczoo.federation.uplink import Uplink
from fczoo.testing.method_under_test import SHORT
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_device import PRETEND, PretendDevice, pretend_device, to_pretend_device
from helpers_methods import first_tasks, quick_method
from helpers_warm import warm_python

OPTIONS: dict[str, dict[str, Any]] = {
    "glfc": {"detector": "oracle"},
    "lga": {"detector": "oracle"},
    "fisheravg": {"fisher": "true"},
}
"""Options with which a method runs more of its code."""
PROTECTION: tuple[dict[str, Any], ...] = (
    {"outliers": 3.0},
    {"min_class_count": 2},
    {"dp_clip": 1.0, "dp_noise": 0.01},
)
FEW = {"krum": "krum:0", "multi_krum": "multi_krum:0"}  # the toy benchmark has three clients
TEACHER = {("to the host", "local_trainer.py:_with_teacher")}
CASES = [(name, 3, "crop") for name in METHODS.names()]
"""Batched clients on random views, which run most of the code for devices."""
CASES += [
    (name, 1, "none") for name in METHODS.names() if hasattr(METHODS.get(name), "teacher_outputs")
]
"""Methods with a teacher on fixed views, whose outputs are looked up."""
ROBUST = [FEW.get(name, name) for name in AGGREGATORS.names()]


class InterruptedRun(Exception):
    """End the run as if its process had been killed."""


def kill() -> None:
    raise InterruptedRun


def method_of(name: str) -> Method:
    return quick_method(name, **OPTIONS.get(name, {}))


def bench_of(method: Method, tasks: int = 2, **settings: Any) -> Benchmark:
    """Return the first tasks of the toy benchmark, in one round each unless ``settings`` differ."""
    return first_tasks(toy_bench(**{"rounds": 1, **SHORT, **settings}), tasks)


def protection(method: Method) -> dict[str, Any]:
    """Return all settings of ``PROTECTION`` that the method supports."""
    wanted: dict[str, Any] = {}
    for settings in PROTECTION:
        try:
            Uplink(method, toy_bench(**settings).settings, 0, 3).check()
        except FczooError:
            continue
        wanted |= settings
    return wanted


def test_mixed_devices_are_rejected() -> None:
    with pretend_device():
        on_device, on_cpu = torch.ones(3, device=PRETEND), torch.ones(3)
        scalar = torch.tensor(2.0)
        assert (on_device * scalar).device == PRETEND
        assert (on_device * scalar).cpu().tolist() == [2.0, 2.0, 2.0]
        for mix in (
            lambda: on_device + on_cpu,
            lambda: on_cpu.add_(on_device),
            lambda: on_cpu[on_device.long()],
            lambda: torch.stack([on_device.sum(), scalar]),
            lambda: scalar.add_(on_device.sum()),
            lambda: torch.where(on_cpu > 0, on_device, on_device),
            lambda: torch.vmap(lambda row: row * on_cpu)(on_device[None]),
        ):
            with pytest.raises(RuntimeError, match="mixed"):
                mix()
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device=PRETEND, generator=torch.Generator())
        with pytest.raises((RuntimeError, TypeError)):
            on_device.numpy()


def test_gradients_pass_devices_only_by_copies() -> None:
    with pretend_device():
        start = torch.ones(2, requires_grad=True)
        (start.to(PRETEND) * torch.tensor([3.0, 4.0], device=PRETEND)).sum().backward()
        assert start.grad is not None
        assert start.grad.tolist() == [3.0, 4.0]


def test_every_wait_is_counted() -> None:
    with pretend_device() as device:
        on_device = torch.arange(4).to(PRETEND)
        on_device.cpu()
        assert int(on_device.sum()) == 6
        assert bool((on_device > 0).any())
        assert on_device.tolist() == [0, 1, 2, 3]
        assert len(on_device[on_device > 1]) == 2
        assert on_device.nonzero().shape == (3, 1)
        assert torch.equal(on_device, on_device)
        torch.empty(4, dtype=torch.int64).copy_(on_device)
    waits = Counter[str]()
    for (kind, _), times in device.waits.items():
        waits[kind] += times
    assert waits == {"to the device": 1, "to the host": 3, "value": 3, "shape": 2}


@contextmanager
def waits_of_steps(device: PretendDevice) -> Iterator[Counter[tuple[str, str]]]:
    """Count the places where training steps wait for the device."""
    step_waits = Counter[tuple[str, str]]()
    steps = LocalTrainer.steps

    def count_waits(*args: Any) -> None:
        earlier_waits = device.waits.copy()
        steps(*args)
        step_waits.update(device.waits - earlier_waits)

    with mock.patch.object(LocalTrainer, "steps", count_waits):
        yield step_waits


@pytest.mark.slow
@pytest.mark.parametrize("name, together, augment", CASES)
def test_method_mixes_no_devices(name: str, together: int, augment: str, tmp_path: Path) -> None:
    """Match the CPU's accuracy under attack and protection, after a kill and a resume.

    A training step waits for nothing: the host only queues work, and even the loss is read once per
    round. With fixed views, cached outputs of the teacher are looked up, as in the test below.
    """
    method = method_of(name)
    settings = {
        "attack": None if method.training().own_models else "gaussian:1",
        "attackers": 0.34,
        "together": together,
        **protection(method),
    }
    bench = bench_of(method, augment=augment, **settings)
    expected = bench.run(method)
    path = tmp_path / "checkpoint.safetensors"
    probe = None if method.training().own_models else Probe(tmp_path)
    with pretend_device() as device, waits_of_steps(device) as waits:
        on_device = to_pretend_device(bench)
        on_device.train.query(torch.arange(len(on_device.train.labels)))
        with pytest.raises(InterruptedRun):
            on_device.run(method, checkpoint=Checkpoint(path, kill), probe=probe)
        result = on_device.run(method, checkpoint=Checkpoint(path), probe=probe)
    assert result.accuracy == expected.accuracy
    assert result.rejected == expected.rejected
    assert set(waits) <= (TEACHER if augment == "none" else set())


@pytest.mark.parametrize("spec", [*ROBUST, *(f"attack {name}" for name in ATTACKS.names())])
def test_aggregators_and_attacks_mix_no_devices(spec: str) -> None:
    method = small_method("fedavg", tune="head")
    attack = spec.removeprefix("attack ")
    settings = {"aggregator": spec} if attack == spec else {"attack": attack, "attackers": 0.34}
    bench = bench_of(method, 1, **settings)
    with pretend_device():
        assert to_pretend_device(bench).run(method).accuracy == bench.run(method).accuracy


@pytest.mark.parametrize(
    ("waiting", "compress"),
    [("host", None), ("disk", None), ("host", "topk:0.3"), ("host", "lowrank:2"), ("disk", "int8")],
)
def test_spilled_uploads_mix_no_devices(waiting: str, compress: str | None) -> None:
    """Let large uploads wait on the host or on disk, as on an accelerator."""
    method, plan = small_method("hgp"), run.FederatedRun._plan
    robust = {"attack": "gaussian:1", "attackers": 0.34, "outliers": 3.0, "aggregator": "norm_clip"}
    bench = bench_of(method, 1, **({"compress": compress} if compress else robust))
    with (
        pretend_device(),
        mock.patch.object(
            run.FederatedRun, "_plan", lambda run: replace(plan(run), waiting=waiting)
        ),
    ):
        assert to_pretend_device(bench).run(method).accuracy == bench.run(method).accuracy


def test_step_with_cached_teacher_waits_for_lookup() -> None:
    """Wait once: with a fixed view the teacher's outputs are looked up per image."""
    method = method_of("lwf")
    with pretend_device() as device, waits_of_steps(device) as waits:
        to_pretend_device(bench_of(method, augment="none")).run(method)
    assert set(waits) == TEACHER


@pytest.mark.slow
def test_gpu_script_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    words = ["--device", "cpu", "--small", "--methods", "fedproto", "--out", str(tmp_path)]
    done = subprocess.run(
        [warm_python(), str(script), *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["parts"] == {"same numbers": True, "whole runs": True, "steps": True, "HGP": True}
    assert {row["difference"] for row in report["same numbers"]} == {0.0}
