"""``--server-optimizer``: steps of the server, by hand and in runs."""

import pytest
import torch
from safetensors.torch import load_file

from fczoo import FczooError, Settings, create_method, save_model
from fczoo.core.registry import SERVER_OPTIMIZERS
from fczoo.core.tree import nbytes
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.run import FederatedRun
from fczoo.federation.server_optimizers import make_server_optimizer, step_server
from helpers_engine import run_to_end

# Two rounds of one number that starts at 1: clients move it by 0.5 on average, then by -0.2.
# fedavgm:0.5    m = 0.5, then 0.25 - 0.2 = 0.05: 1.5, then 1.55.
# The others with lr 1 and tau 0.5, so v = 0.25 at first; beta1 0.5: m = 0.25, then 0.125 - 0.1.
# fedadam        beta2 0.5: v = 0.125 + 0.125 = 0.25: 1 + 0.25 / 1 = 1.25;
#                v = 0.125 + 0.02 = 0.145: 1.25 + 0.025 / (sqrt(0.145) + 0.5).
# fedyogi        v - square is 0 at first, so v stays 0.25: 1.25;
#                then v = 0.25 - 0.5 * 0.04 = 0.23: 1.25 + 0.025 / (sqrt(0.23) + 0.5).
# fedadagrad     v = 0.25 + 0.25 = 0.5: 1 + 0.25 / (sqrt(0.5) + 0.5) = 1.2071067...;
#                v = 0.54: ... + 0.025 / (sqrt(0.54) + 0.5).
FIRST_ADAGRAD = 1 + 0.25 / (0.5**0.5 + 0.5)
BY_HAND = {
    "fedavgm:0.5": (1.5, 1.55),
    "fedavgm:0.5,lr=2": (2.0, 2.1),
    "fedadam:1,beta1=0.5,beta2=0.5,tau=0.5": (1.25, 1.25 + 0.025 / (0.145**0.5 + 0.5)),
    "fedyogi:1,beta1=0.5,beta2=0.5,tau=0.5": (1.25, 1.25 + 0.025 / (0.23**0.5 + 0.5)),
    "fedadagrad:1,beta1=0.5,tau=0.5": (
        FIRST_ADAGRAD,
        FIRST_ADAGRAD + 0.025 / (0.54**0.5 + 0.5),
    ),
}


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("spec", "expected"), BY_HAND.items())
def test_two_rounds_by_hand(spec, expected):
    optimizer, state, moments = make_server_optimizer(spec), {"w": numbers(1.0)}, {}
    values = []
    for change in (0.5, -0.2):
        merged = {"w": state["w"] + change, "class.sum": numbers(7.0)}
        new, moments = step_server(optimizer, moments, merged, state, "toy")
        assert new["class.sum"].item() == 7.0  # statistics have no step
        state = {"w": new["w"]}
        values.append(state["w"].item())
    assert values == pytest.approx(expected, rel=1e-12)


def test_every_optimizer_has_values_by_hand():
    assert {spec.partition(":")[0] for spec in BY_HAND} == set(SERVER_OPTIMIZERS.names())


def test_unchanged_tensor_stays_unchanged():
    for spec in BY_HAND:
        optimizer = make_server_optimizer(spec)
        state = {"w": numbers(0.3, -2.0)}
        new, _ = step_server(optimizer, {}, dict(state), state, "toy")
        assert torch.equal(new["w"], state["w"])


def test_tensors_without_average_are_rejected():
    optimizer = make_server_optimizer("fedavgm")
    for merged in ({}, {"w": torch.zeros(2, 3)}):
        with pytest.raises(FczooError, match="toy does not average w; leave it out"):
            step_server(optimizer, {}, merged, {"w": torch.zeros(3)}, "toy")


@pytest.mark.parametrize(
    ("method", "spec", "says"),
    [
        ("fedncm", "fedadam", "fedncm trains none"),
        ("lorm", "fedavgm", "lorm does not average them"),
        ("fcilpt", "fedavgm", "fcilpt does not average them"),
    ],
)
def test_unsupported_methods_are_rejected(make_bench, method, spec, says):
    with pytest.raises(FczooError, match=says):
        make_bench(server_optimizer=spec).check(create_method(method))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server_optimizer": "fedadem"}, "no server optimizer is called 'fedadem'; .*fedadam"),
        ({"server_optimizer": "fedadam:-1"}, "lr"),
        ({"compress": "int4"}, "no compression is called 'int4'"),
        ({"compress": "topk:2"}, "part"),
        ({"compress": "lowrank:0.5"}, "rank"),
    ],
)
def test_invalid_settings_are_rejected_without_data(changes, says):
    with pytest.raises(FczooError, match=says):
        Settings.for_dataset("digits", **changes).check()


HEAD = {"tune": "head", "optimizer": "sgd"}


def test_momentum_zero_equals_average(make_bench, small_method):
    method = small_method("fedavg", **HEAD)
    plain, ours = (
        run_to_end(make_bench(server_optimizer=spec, epochs=1), method)
        for spec in (None, "fedavgm:0")
    )
    for name, value in plain.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=1e-12, atol=1e-12)


def test_moments_are_reset_each_task(make_bench, small_method, tmp_path):
    """Keep moments only of the task's rows, so that rows of finished tasks stay bit for bit."""
    run = FederatedRun(
        make_bench(server_optimizer="fedadam:0.1", epochs=1),
        small_method("fedavg", **HEAD),
        0,
        Callback(),
        None,
        None,
    )
    tasks = iter(run)
    next(tasks)
    old = run.state["head.weight"].clone()
    assert run.server.moments["m.head.weight"][:3].any()
    next(tasks)
    moments = run.server.moments
    assert moments.keys() == {f"{k}.head.{n}" for k in "mv" for n in ("weight", "bias")}
    assert not moments["m.head.weight"][:3].any() and moments["m.head.weight"][3:5].any()
    assert torch.equal(run.state["head.weight"][:3], old[:3])
    assert run.result.server_storage == nbytes(run.state) + nbytes(moments)
    saved = load_file(save_model(tmp_path, run) / "server_state.safetensors")
    for name, value in moments.items():
        assert torch.equal(saved[f"server_optimizer.{name}"], value)


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_killed_run_resumes_with_moments_and_residuals(make_bench, small_method, tmp_path, saved):
    saves: list[int] = []

    class SimulatedKill(Exception):
        pass

    def kill() -> None:
        saves.append(1)
        if len(saves) == saved:
            raise SimulatedKill

    settings = {"server_optimizer": "fedyogi:0.1", "compress": "topk:0.1", "participation": 2}
    bench, path = make_bench(**settings, rounds=3, epochs=1), tmp_path / "checkpoint"
    method = small_method("fedavg", **HEAD)
    with pytest.raises(SimulatedKill):
        run_to_end(bench, method, Checkpoint(path, kill))
    uninterrupted, resumed = run_to_end(bench, method), run_to_end(bench, method, Checkpoint(path))
    for ours, theirs in (
        (resumed.state, uninterrupted.state),
        (resumed.server.moments, uninterrupted.server.moments),
        *((resumed.residuals[k], uninterrupted.residuals[k]) for k in uninterrupted.residuals),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert resumed.residuals.keys() == uninterrupted.residuals.keys() and uninterrupted.residuals
    assert resumed.result.bytes_up == uninterrupted.result.bytes_up
