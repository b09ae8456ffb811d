"""Test the first trials of ``fczoo tune``: default options, then points of the search space."""

from dataclasses import asdict

import pytest

from fczoo import FczooError
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.runner.tuned_file import TUNED_FILE, read_tuned
from fczoo.runner.tuning_trials import SOBOL_TRIALS, default_values, extended_space, sobol_point
from helpers_cli import run

TINY = ["--train-per-class", "20", "--rounds", "1", "--epochs", "1", "--clients", "3"]


def test_search_space_is_extended_to_default_value():
    space = {"lr": (1e-3, 1e-1, "log"), "kind": ["a", "b"]}
    assert extended_space(space, {"lr": 0.5, "kind": "c"}) == {
        "lr": [1e-3, 0.5, "log"],
        "kind": ["a", "b", "c"],
    }
    assert extended_space(space, {"lr": None, "kind": "a"}) == {
        "lr": [1e-3, 1e-1, "log"],
        "kind": ["a", "b"],
    }


def test_first_trial_has_default_options():
    """Start the search from the default options of the method.

    If head_lr is none, lr replaces it. Other options with default none need a choice of none.
    """
    space = {"head_lr": [1e-3, 1e-1, "log"], "lr": [1e-3, 1e-1, "log"]}
    assert default_values(space, {"head_lr": None, "lr": 0.03}) == {"head_lr": 0.03, "lr": 0.03}
    assert default_values({"memory": [None, 20]}, {"memory": None}) == {"memory": None}
    with pytest.raises(FczooError, match="ridge is none by default"):
        default_values({"ridge": [1e-2, 1e8, "log"]}, {"ridge": None, "lr": 0.01})


def test_next_trials_spread_from_middle_of_space(tmp_path):
    space = {"lr": [1e-4, 1.0, "log"], "kind": ["a", "b"], "part": [0.0, 1.0, "linear"]}
    points = [tuple(sobol_point(space, number).values()) for number in range(1, SOBOL_TRIALS + 1)]
    assert [kind for _, kind, _ in points] == ["b", "a", "b", "a"]
    assert [part for _, _, part in points] == [0.5, 0.25, 0.75, 0.625]
    assert [lr for lr, _, _ in points] == pytest.approx([1e-2, 1e-1, 1e-3, 10**-2.5])
    small = [
        "--methods",
        "fedavg",
        *TINY,
        "--first-tasks",
        "1",
        "--trials",
        "6",
        "--out",
        str(tmp_path),
    ]
    run("tune", "--set", "fedavg.tune=head", *small)
    search = read_tuned(tmp_path / TUNED_FILE).methods["fedavg"]
    values_by_trial = [trial["values"] for trial in search.trials]
    assert values_by_trial[1 : SOBOL_TRIALS + 1] == [
        sobol_point(search.space, number) for number in range(1, SOBOL_TRIALS + 1)
    ]
    assert len({tuple(values.values()) for values in values_by_trial}) == 6


@pytest.mark.parametrize("name", METHODS.names())
def test_first_trial_has_default_options_for_every_method(name):
    defaults = asdict(create_method(name, "digits"))
    space = extended_space(spaces(METHODS.get(name)), defaults)
    first_values = default_values(space, defaults).items()
    assert all(
        value == defaults[option] or (option, defaults[option]) == ("head_lr", None)
        for option, value in first_values
    )
