"""Runs between sites against a simulation with the same partition."""

import pytest
import torch

from fczoo.core.registry import METHODS
from helpers_methods import quick_method
from helpers_sites import LocalConnection, server_of, simulate, sites_of

EQUAL_FIELDS = (
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
BY_NUMBER = ("pip", "ranpac", "stsae")  # they draw per image by its index in the data set
METHODS_OF_SITES = [
    name
    for name in METHODS.names()
    if METHODS.get(name)().training().data_scope != "pooled" and name != "local"
]


def simulate_and_run(make_bench, method, folder, **settings):
    """Return a finished simulation and a finished run between sites."""
    small = {"epochs": 1, "batch_size": 8, **settings}
    simulation = simulate(make_bench(**small), method)
    bench = make_bench(**small)
    remote = server_of(bench, method, LocalConnection(sites_of(bench, method, folder)))
    simulation.run()
    remote.run()
    return simulation, remote


def assert_equal_runs(simulation, remote):
    """Compare accuracy, state and counts of two runs."""
    for name in EQUAL_FIELDS:
        assert repr(getattr(remote.result, name)) == repr(getattr(simulation.result, name)), name
    # the server of real sites does not know the classes of each client
    of_clients = {name for name in simulation.result.metrics if name.startswith("client_")}
    assert len(of_clients) == 3
    for name in simulation.result.metrics.keys() - of_clients:
        if name == "ECE":  # a sum of floats, of which torch 2.6 may give another last bit
            assert remote.result.metrics[name] == pytest.approx(
                simulation.result.metrics[name], rel=1e-12
            )
        else:
            assert repr(remote.result.metrics[name]) == repr(simulation.result.metrics[name]), name
    assert not of_clients & remote.result.metrics.keys()
    assert remote.state.keys() == simulation.state.keys()
    for name, value in simulation.state.items():
        torch.testing.assert_close(remote.state[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in METHODS_OF_SITES if n not in BY_NUMBER])
def test_site_run_matches_simulation(make_bench, tmp_path, name):
    """Compare every method, with participation 0.7 and a client without images of a task."""
    settings = {"participation": 0.7, "augment": "crop"}
    assert_equal_runs(*simulate_and_run(make_bench, quick_method(name), tmp_path, **settings))


@pytest.mark.parametrize("name", BY_NUMBER)
def test_methods_with_per_index_draws_run_between_sites(make_bench, small_method, tmp_path, name):
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
def test_settings_have_same_effect_as_in_simulation(
    make_bench, small_method, tmp_path, name, settings
):
    """Compare settings such as clipping, withheld classes, outliers and control variates."""
    simulation, remote = simulate_and_run(make_bench, small_method(name), tmp_path, **settings)
    assert_equal_runs(simulation, remote)
    plain = simulate(make_bench(epochs=1, batch_size=8), small_method(name))
    plain.run()
    differs = any(not torch.equal(plain.state[k], value) for k, value in simulation.state.items())
    assert differs or "outliers" in settings, "the setting does nothing here"
