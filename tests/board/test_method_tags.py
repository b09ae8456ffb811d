"""Tags of a method from its registration and runs, and its row in a ranking."""

import json

import pytest

from fczoo.board.benchmark_page import TENSOR_KINDS, choices, tags_of, tensor_kinds
from fczoo.board.pages import candidates
from fczoo.core.files import write_json
from fczoo.core.registry import METHODS, create_method
from fczoo.reports.run_config import count_changes
from fczoo.reports.runs import read_experiments
from helpers_runs import tune


@pytest.mark.parametrize(
    ("method", "family", "exemplars", "trained"),
    [
        ("hgp", "prompts", "none", ("prompts", "head")),
        ("pilora", "LoRA", "none", ("LoRA", "prototypes")),
        ("icarl", "exemplars", "kept", ("head", "whole network")),
        ("fedncm", "statistics only", "none", ("nothing",)),
        ("ewc", "whole network", "none", ("head", "whole network")),
        ("stranger", "not installed here", "not installed here", ("not installed here",)),
    ],
)
def test_tags_describe_method(method, family, exemplars, trained, make_run, tmp_path):
    (experiment,) = read_experiments([make_run(tmp_path / "run", {method: {0: 50.0}})])
    assert tags_of(experiment.lines[0]) == {
        "family": (family,),
        "exemplars": (exemplars,),
        "trained": trained,
        "sent": ("parameters", "counts"),  # as the run counted them
        "tuning": ("no trials",),
    }


def test_tags_list_trials_of_row(make_run, tmp_path):
    for name, trials, found_for in [("a", 5, ["hgp"]), ("b", 12, ["hgp"]), ("c", 9, ["fedncm"])]:
        tune(make_run(tmp_path / name, {"hgp": {ord(name): 50.0}}), trials, found_for)
    (experiment,) = read_experiments([tmp_path])
    (line,) = experiment.lines
    assert tags_of(line)["tuning"] == ("5 trials", "12 trials", "no trials")
    assert choices([tags_of(line)])["tuning"] == ["12 trials", "5 trials", "no trials"]


@pytest.mark.parametrize("name", METHODS.names("fczoo.methods") + METHODS.names("fczoo.baselines"))
def test_trained_tensors_have_known_kinds(name):
    """Find an entry in ``TENSOR_KINDS`` for every prefix that a method trains."""
    assert set(tensor_kinds(create_method(name).training().trained_prefixes)) <= set(
        TENSOR_KINDS.values()
    )


def test_upper_bound_is_separate_family(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"joint": {0: 50.0}})
    path = folder / "joint" / "seed0" / "result.json"
    write_json(
        path,
        {**json.loads(path.read_text()), "remark": "upper bound: keeps the images of all tasks"},
    )
    (experiment,) = read_experiments([folder])
    assert tags_of(experiment.lines[0])["family"] == ("upper bound",)
    assert not candidates(experiment)


def test_candidate_is_row_nearest_to_method_values(make_run, tmp_path):
    """Select the row nearest to a method's own values, not the best one.

    On digits, PILoRA's values are its defaults, such as rank 4, with head_tune.
    """
    make_run(tmp_path / "a", {"pilora": {0: 90.0}}, {"head_tune": False, "rank": 8})
    make_run(tmp_path / "b", {"pilora": {0: 40.0}}, {"head_tune": True, "rank": 8})
    make_run(tmp_path / "c", {"pilora": {0: 20.0}}, {"head_tune": True, "rank": 4})
    (experiment,) = read_experiments([tmp_path])
    by_score = {line.results[0].accuracy[1][0]: count_changes(line) for line in experiment.lines}
    usual = candidates(experiment)["pilora"][0].results[0].accuracy[1][0]
    assert by_score == {90.0: 2, 40.0: 1, 20.0: 0} and usual == 20.0


def test_candidate_follows_protocol_with_most_trials(make_run, tmp_path):
    """Select the row that follows the protocol and has the rates of most trials.

    Protocol quick initialises heads at class means. A run that trains only the head, or starts it
    at zero, is not FedAvg, whatever its rates.
    """
    quick, own_options = (
        {"dataset": "cifar100", "protocol": "quick"},
        {"tune": "full", "head_init": "means"},
    )
    make_run(
        tmp_path / "bare",
        {"fedavg": {0: 90.0}},
        {**own_options, "tune": "head", "lr": 1e-4},
        **quick,
    )
    make_run(
        tmp_path / "zeros", {"fedavg": {0: 80.0}}, {**own_options, "head_init": "zeros"}, **quick
    )
    for score, trials in [(70.0, 5), (40.0, 12), (60.0, 0)]:
        folder = make_run(
            tmp_path / str(trials),
            {"fedavg": {0: score}},
            {**own_options, "lr": score, "lr_backbone": score},
            **quick,
        )
        tune(folder, trials, ["fedavg"])
    (experiment,) = read_experiments([tmp_path])
    by_score = {line.results[0].accuracy[1][0]: count_changes(line) for line in experiment.lines}
    usual = candidates(experiment)["fedavg"][0].results[0].accuracy[1][0]
    assert by_score == {90.0: 1, 80.0: 1, 70.0: 0, 40.0: 0, 60.0: 0}
    assert usual == 40.0
