"""Clients on remote workers: requests and responses are bytes, and the numbers are equal."""

import pytest
import torch

from fczoo import Benchmark, create_method
from fczoo.federation.checkpoint import Checkpoint, ClientState
from fczoo.federation.client import ClientRequest
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.remote import RemoteWorker
from fczoo.federation.run import FederatedRun
from helpers_remote import Losses, Workers, bits, outcome, run_local_and_remote


@pytest.mark.parametrize(("name", "options"), [("lwf", {}), ("hgp", {}), ("podnet", {"memory": 3})])
@pytest.mark.parametrize("together", [1, 3])
def test_remote_run_matches_local_run(make_bench, small_method, name, options, together):
    settings = {
        "local": "scaffold",
        "compress": "topk:0.2",
        "server_optimizer": "fedavgm:0.5",
        "attack": "label-flip",
        "attackers": 0.34,
        "client_devices": "phones",
        "together": together,
        "epochs": 1,
    }
    local, away = run_local_and_remote(
        lambda: make_bench(torch.float32, augment="none", **settings), small_method(name, **options)
    )
    assert outcome(away) == outcome(local)
    assert away.result.curve_seconds == local.result.curve_seconds != []
    assert bits(away.server.controls.server) == bits(local.server.controls.server)
    assert {k: bits(v) for k, v in away.residuals.items()} == {
        k: bits(v) for k, v in local.residuals.items()
    }
    assert away.residuals
    assert {k: bits(v) for k, v in away.memories.items()} == {
        k: bits(v) for k, v in local.memories.items()
    }


def test_local_run_resumes_on_remote_workers(make_bench, small_method, tmp_path):
    class InterruptedRun(Exception):
        pass

    def kill() -> None:
        raise InterruptedRun

    def bench() -> Benchmark:
        return make_bench(torch.float32, augment="none", local="scaffold")

    method, path = small_method("glfc", tune="head"), tmp_path / "checkpoint"
    reference, _ = run_local_and_remote(bench, method)
    with pytest.raises(InterruptedRun):
        FederatedRun(bench(), method, 0, Losses(), Checkpoint(path, kill), None).run()
    continuation = FederatedRun(
        bench(), method, 0, Losses(), Checkpoint(path), None, Workers(bench, method)
    )
    assert outcome(continuation)["state"] == outcome(reference)["state"]


@pytest.mark.parametrize("name", ["lwf", "icarl"])
def test_client_state_is_passed_and_returned(make_bench, small_method, watch, name):
    """Answer the same request twice with the upload of the run.

    The client state that is passed does not change.
    """
    record = watch(make_bench(augment="none"), small_method(name))
    call = record.rounds[-1]
    engine: ClientEngine = call.engine
    client_state = ClientState(call.memories, {}, {}, {}).select([call.clients[0].number])
    memory_bits = {k: bits(v) for k, v in client_state.memories.items()}
    request = ClientRequest(None, call.state, {}, call.ctx)
    first, again = (
        engine.runtime.answer(request, call.clients[:1], client_state) for _ in range(2)
    )
    assert bits(dict(first.payloads[0])) == bits(dict(again.payloads[0]))
    for name, value in call.payloads[0].items():  # with cached teacher outputs
        torch.testing.assert_close(first.payloads[0][name], value, rtol=1e-6, atol=1e-9)
    assert {k: bits(v) for k, v in client_state.memories.items()} == memory_bits
    assert not client_state.teacher_outputs


def test_invalid_request_is_rejected(make_bench):
    answering = RemoteWorker(make_bench(), create_method("fedncm"), 0)
    with pytest.raises(ValueError, match="header"):
        answering.unpack_request(b"nothing")
