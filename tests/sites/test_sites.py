"""Runs between sites with separate images: the numbers of a simulation with that split."""

import pytest
import torch

from fczoo.core.registry import METHODS
from helpers_sites import LocalConnection, server_of, simulate, sites_of

ALIKE = (
    "accuracy",
    "class_accuracy",
    "confusion",
    "bytes_up",
    "bytes_down",
    "client_rounds",
    "uploaded",
    "rejected",
    "privacy",
)
BY_NUMBER = ("pip", "ranpac", "stsae")  # they draw for each image by its number in the data set
METHODS_OF_SITES = [
    name
    for name in METHODS.names()
    if METHODS.get(name)().training().data_scope != "pooled" and name != "local"
]


def simulate_and_run(make_bench, method, folder, **settings):
    """Return the simulated run, and that between sites, both finished."""
    small = {"epochs": 1, "batch_size": 8, **settings}
    simulation = simulate(make_bench(**small), method)
    bench = make_bench(**small)
    remote = server_of(bench, method, LocalConnection(sites_of(bench, method, folder)))
    simulation.run()
    remote.run()
    return simulation, remote


def same(here, there):
    """Compare the accuracy of every task, the state and all that is counted."""
    for name in ALIKE:
        assert repr(getattr(there.result, name)) == repr(getattr(here.result, name)), name
    # the server of real sites does not know the classes of each client
    of_clients = {name for name in here.result.metrics if name.startswith("client_")}
    assert len(of_clients) == 3
    for name in here.result.metrics.keys() - of_clients:
        if name == "ECE":  # a sum of floats, of which torch 2.6 may give another last bit
            assert there.result.metrics[name] == pytest.approx(here.result.metrics[name], rel=1e-12)
        else:
            assert repr(there.result.metrics[name]) == repr(here.result.metrics[name]), name
    assert not of_clients & there.result.metrics.keys()
    assert there.state.keys() == here.state.keys()
    for name, value in here.state.items():
        torch.testing.assert_close(there.state[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in METHODS_OF_SITES if n not in BY_NUMBER])
def test_numbers_are_those_of_a_simulation(make_bench, small_method, tmp_path, name):
    """Numbers are those of a simulation.

    This holds for every method, with clients that are not drawn and one that has nothing of a task.
    """
    same(
        *simulate_and_run(
            make_bench, small_method(name), tmp_path, participation=0.7, augment="crop"
        )
    )


@pytest.mark.parametrize("name", BY_NUMBER)
def test_methods_that_draw_by_number_run_between_sites(make_bench, small_method, tmp_path, name):
    simulation, remote = simulate_and_run(make_bench, small_method(name), tmp_path)
    assert remote.state.keys() == simulation.state.keys()
    assert len(remote.result.accuracy) == 3
    assert remote.result.bytes_up == simulation.result.bytes_up
    assert not remote.result.rejected


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"dp_clip": 0.05}),
        ("pilora", {"min_class_count": 3}),
        ("fedproto", {"min_class_count": 4}),
        ("fedncm", {"outliers": 3.0}),
        ("lwf", {"local": "scaffold", "augment": "none"}),
        ("icarl", {"local": "scaffold"}),
        ("hgp", {"compress": "topk:0.2", "server_optimizer": "fedadam:0.01", "local": "moon"}),
        ("hgp", {"aggregator": "median", "together": 3}),
    ],
)
def test_settings_act_as_in_a_simulation(make_bench, small_method, tmp_path, name, settings):
    """Settings act as in a simulation.

    They are clipping, withholding, outliers, control variates, and fixed views with remembered
    teachers.
    """
    simulation, remote = simulate_and_run(make_bench, small_method(name), tmp_path, **settings)
    same(simulation, remote)
    plain = simulate(make_bench(epochs=1, batch_size=8), small_method(name))
    plain.run()
    differs = any(not torch.equal(plain.state[k], value) for k, value in simulation.state.items())
    assert differs or "outliers" in settings, "the setting does nothing here"
