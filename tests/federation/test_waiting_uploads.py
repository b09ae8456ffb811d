"""Uploads that are spilled to disk until the merge."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fczoo import Payload, Settings
from fczoo.federation import run
from fczoo.federation.device import plan_of
from fczoo.federation.waiting_uploads import move_upload
from fczoo.testing.toy_benchmark import small_method, toy_bench

KINDS = {
    "floats": torch.tensor([[1.5, -0.0], [float("nan"), 3e-39]]),
    "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
    "labels": torch.tensor([5, -1]),
    "flags": torch.tensor([True, False, True]),
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def test_spilled_upload_is_read_back_unchanged(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    back = move_upload(Payload(KINDS, client=3, num_samples=7), "disk")
    assert (back.client, back.num_samples, list(back)) == (3, 7, list(KINDS))
    for name, value in KINDS.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape
        assert torch.equal(back[name], value) or name == "floats"
    assert back["floats"].view(torch.int32).equal(KINDS["floats"].view(torch.int32))
    assert not list(tmp_path.rglob("*.*"))  # no name is left behind


def test_empty_upload_stays_empty(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    assert not move_upload(Payload({}, client=1), "disk")


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux says how much memory is of no file"
)
def test_spilled_uploads_take_no_memory(monkeypatch, tmp_path: Path):
    """Keep spilled uploads out of memory.

    Of six uploads of 40 MB, less than two are in memory that no file backs.
    """

    def anonymous() -> int:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["RssAnon"].split()[0]) * 1024

    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    start = anonymous()
    payloads = [
        move_upload(Payload({"w": torch.full((10_000_000,), float(k))}, k), "disk")
        for k in range(6)
    ]
    assert sum(float(p["w"].mean()) for p in payloads) == 15
    assert anonymous() - start < 2 * 40_000_000


def test_spilling_does_not_change_run(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    method, plan = small_method("hgp"), run.FederatedRun._plan
    settings = {"aggregator": "median", "outliers": 3.0}
    in_memory = toy_bench(**settings).run(method)
    with (
        mock.patch.object(
            run.FederatedRun, "_plan", lambda run: replace(plan(run), waiting="disk")
        ),
        mock.patch("fczoo.federation.client_engine.move_upload", side_effect=move_upload) as moves,
    ):
        from_disk = toy_bench(**settings).run(method)
    assert {call.args[1] for call in moves.call_args_list} == {"disk"}
    assert from_disk.accuracy == in_memory.accuracy


@pytest.mark.parametrize(
    "participants, scalars, waits",
    [(10, 25_000_000, "device"), (11, 25_000_000, "disk"), (10, 0, "device")],
)
def test_large_uploads_wait_on_disk(participants: int, scalars: int, waits: str):
    settings = Settings(dataset="digits", clients=100, participation=float(participants))
    assert plan_of(settings, 0, torch.device("cpu"), 100, scalars).waiting == waits


def test_accelerator_keeps_large_uploads_on_host():
    settings = Settings(dataset="digits")
    assert plan_of(settings, 0, torch.device("cuda"), 2, 5_000_000).waiting == "host"
