"""Claims: data that agree with the print, and verdicts worked out by hand."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import fczoo.runner.grid
from fczoo import create_method
from fczoo.cli.app import main
from fczoo.papers.claims import PlainClaim, PrintedClaim, claims, get_claim
from fczoo.papers.judging import regime
from fczoo.papers.readings import readings
from fczoo.reports.runs import read_experiments
from helpers_runs import tune, write_run


def said(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["claims", *arguments])
    assert done.exit_code == code, done.output
    return done.output


ALL = sum(claim.runnable for claim in claims().values())
PRINTED = {name: claim for name, claim in claims().items() if isinstance(claim, PrintedClaim)}


@pytest.mark.parametrize("name", [name for name, claim in PRINTED.items() if claim.runnable])
def test_every_claim_is_what_the_paper_prints(name):
    claim = PRINTED[name]
    assert claim.gain > 0, "the row that is called better is not printed as better"
    followed = [number for number in claim.numbers if not claim.source.row(number).why]
    assert len(claim.cards()) == len(followed), "one of its rows has no command at the paper's scale"
    ours, theirs = claim.sides
    assert (ours.method, ours.options) != (theirs.method, theirs.options)


@pytest.mark.parametrize("name", [name for name, claim in PRINTED.items() if claim.runnable])
def test_a_claim_knows_the_runs_of_its_commands_at_the_papers_scale(name, tmp_path):
    claim = PRINTED[name]
    for number, side in zip(claim.numbers, claim.sides, strict=True):
        for i, reading in enumerate([] if claim.source.row(number).why else readings(claim.source, number)):
            folder = tmp_path / f"{number.value}-{i}"
            write_run(folder, {reading.method: {0: 50.0}}, reading.options, partition="dirichlet:0.5")
            (experiment,) = read_experiments([folder])
            assert claim.matches(experiment.lines[0], side), reading.name


def test_there_are_enough_claims_over_all_papers():
    assert sum(claim.runnable for claim in PRINTED.values()) >= 40
    assert {claim.paper for claim in PRINTED.values()} == {"pilora", "hgp", "fcilpt", "fppl"}


@pytest.mark.parametrize("name", sorted(claims().keys() - PRINTED.keys()))
def test_every_plain_claim_sets_two_methods_apart(name):
    claim = get_claim(name)
    assert isinstance(claim, PlainClaim) and claim.runnable and claim.by
    made = [create_method(side.method, **side.options) for side in claim.sides]
    assert made[0] != made[1]
    assert f"{claim.by}; {claim.figure}." in said(name)
    assert name in said() and name not in said("--paper", "hgp")


def test_an_ablation_does_not_pass_for_the_method_in_a_plain_claim(tmp_path):
    run(tmp_path / "a", "fedncm", {0: 40.0, 1: 50.0, 2: 60.0})
    run(tmp_path / "b", "fecam", {0: 52.0, 1: 60.0, 2: 68.0}, covariance="diagonal")
    assert get_claim("fecam-ncm").verdicts(read_experiments([tmp_path])) == []
    run(tmp_path / "c", "fecam", {0: 52.0, 1: 60.0, 2: 68.0})
    assert [verdict for verdict, _ in get_claim("fecam-ncm").verdicts(read_experiments([tmp_path]))] == [
        "holds"
    ]


def test_an_option_that_came_later_keeps_no_run_from_a_plain_claim(tmp_path):
    run(tmp_path / "a", "fedncm", {0: 40.0, 1: 50.0, 2: 60.0})
    before = {"ridge": 1.0, "scaled": False, "normalise": False, "features": "plain"}  # now lift
    write_run(tmp_path / "b", {"fedridge": {0: 52.0, 1: 60.0, 2: 68.0}}, before, partition="dirichlet:0.5")
    ((verdict, _),) = get_claim("ridge-ncm").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds"


def test_a_plain_claim_is_judged_like_a_printed_one(tmp_path):
    run(tmp_path / "a", "fedavg", {0: 52.0, 1: 60.0, 2: 68.0}, tune="head", head_init="means")
    run(tmp_path / "b", "fedavg", {0: 40.0, 1: 50.0, 2: 60.0}, tune="head", head_init="default")
    run(tmp_path / "c", "fedavg", {0: 40.0, 1: 50.0, 2: 60.0}, tune="head", lr=0.5, head_init="default")
    ((verdict, text),) = get_claim("head-means").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+5.0 [+2.5, +7.5] over 3 seeds")


def run(folder: Path, method: str, by_seed: dict[int, float], epochs: int = 1, **options) -> None:
    made = create_method(method, **options)
    plain = {name: getattr(made, name) for name in type(made).__dataclass_fields__}
    write_run(folder, {method: by_seed}, plain, partition="dirichlet:0.5", epochs=epochs)


def test_a_difference_is_paired_over_seeds_and_has_an_interval(tmp_path):
    # A_N is (last + 80) / 2: gains of 6, 5 and 4 points, mean 5, standard deviation 1, t(2) = 4.303
    run(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0, 2: 68.0}, reweight="distance")
    run(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0, 2: 60.0}, reweight="average")
    ((verdict, text),) = get_claim("pilora-reweight").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds"
    assert text.startswith("+5.0 [+2.5, +7.5] over 3 seeds; digits dirichlet:0.5")


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ({0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}, "does not hold"),
        ({0: 52.0, 1: 40.0, 2: 60.0}, {0: 40.0, 1: 52.0, 2: 60.0}, "not told apart"),
        ({0: 52.0}, {0: 40.0}, "not told apart"),
        ({0: 52.0}, {1: 40.0}, "not told apart"),
    ],
)
def test_verdicts(tmp_path, better, worse, verdict):
    run(tmp_path / "a", "pilora", better, reweight="distance")
    run(tmp_path / "b", "pilora", worse, reweight="average")
    ((found, _),) = get_claim("pilora-reweight").verdicts(read_experiments([tmp_path]))
    assert found == verdict


def test_runs_that_differ_in_more_than_the_claim_say_nothing(tmp_path):
    run(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, reweight="distance", rank=8)
    run(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="average")
    assert get_claim("pilora-reweight").verdicts(read_experiments([tmp_path])) == []


def test_a_claim_about_a_rate_of_0_takes_any_other_rate_for_its_better_side(tmp_path):
    run(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0, 2: 68.0}, lr_prototype=0.03, lr_lora=0.002)
    run(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0, 2: 60.0}, lr_prototype=0.03, lr_lora=0.0)
    run(tmp_path / "c", "pilora", {0: 10.0, 1: 20.0, 2: 30.0}, lr_prototype=0.3, lr_lora=0.0)  # and this one
    ((verdict, text),) = get_claim("pilora-lora").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+5.0 [+2.5, +7.5] over 3 seeds")
    better, worse = get_claim("pilora-lora").sides
    assert "lr_lora" not in better.options and worse.options["lr_lora"] == 0


def test_a_method_of_which_a_rate_of_0_switches_a_part_off_does_not_pass_for_it(tmp_path):
    run(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, lr_lora=0.0)
    run(tmp_path / "b", "ewc", {0: 40.0, 1: 50.0}, lr_backbone=0.0)
    run(tmp_path / "c", "fedavg", {0: 40.0, 1: 50.0})
    run(tmp_path / "d", "icarl", {0: 40.0, 1: 50.0})
    experiments = read_experiments([tmp_path])
    assert not any(get_claim(n).verdicts(experiments) for n in ("pilora-icarl", "ewc-plain-forgetting"))
    run(tmp_path / "e", "pilora", {0: 52.0, 1: 60.0}, lr_lora=1e-5)
    run(tmp_path / "f", "ewc", {0: 40.0, 1: 50.0}, lr_backbone=1e-5)
    experiments = read_experiments([tmp_path])
    assert len(get_claim("pilora-icarl").verdicts(experiments)) == 1
    assert len(get_claim("ewc-plain-forgetting").verdicts(experiments)) == 1


def test_a_probe_of_the_head_does_not_pass_for_a_method_that_trains_the_network(tmp_path):
    run(tmp_path / "a", "pilora", {0: 40.0, 1: 50.0})
    run(tmp_path / "b", "joint", {0: 52.0, 1: 60.0}, tune="head")
    assert get_claim("pilora-joint").verdicts(read_experiments([tmp_path])) == []
    run(tmp_path / "c", "joint", {0: 52.0, 1: 60.0}, tune="full")
    run(tmp_path / "d", "joint", {0: 62.0, 1: 70.0}, tune="lora")  # as PILoRA's print has it
    assert len(get_claim("pilora-joint").verdicts(read_experiments([tmp_path]))) == 2


def test_an_ablation_does_not_pass_for_the_method(tmp_path):
    run(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0}, rebalance="none")
    run(tmp_path / "b", "l2p", {0: 40.0, 1: 50.0})
    assert get_claim("hgp-l2p").verdicts(read_experiments([tmp_path])) == []


def test_an_ablation_of_another_paper_does_not_pass_for_its_method(tmp_path):
    run(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0})
    run(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="average")
    assert get_claim("hgp-pilora").verdicts(read_experiments([tmp_path])) == []


def test_clients_that_are_told_of_a_new_task_do_not_pass_for_those_that_notice_it(tmp_path):
    run(tmp_path / "a", "fppl", {0: 52.0, 1: 60.0})
    run(tmp_path / "b", "glfc", {0: 40.0, 1: 50.0}, detector="oracle")
    assert get_claim("fppl-glfc").verdicts(read_experiments([tmp_path])) == []
    run(tmp_path / "c", "glfc", {0: 40.0, 1: 50.0})
    assert len(get_claim("fppl-glfc").verdicts(read_experiments([tmp_path]))) == 1


def test_rows_as_printed_and_as_released_are_not_compared_with_each_other(tmp_path):
    run(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, reweight="squared")
    run(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="distance", ortho=0.0)
    assert get_claim("pilora-orthogonal").verdicts(read_experiments([tmp_path])) == []
    run(tmp_path / "c", "pilora", {0: 40.0, 1: 50.0}, reweight="squared", ortho=0.0)
    assert len(get_claim("pilora-orthogonal").verdicts(read_experiments([tmp_path]))) == 1


def test_less_forgetting_is_better(tmp_path):
    # forgetting is 90 - last
    run(tmp_path / "a", "fppl", {0: 80.0, 1: 81.0})
    run(tmp_path / "b", "ewc", {0: 60.0, 1: 60.0})
    ((verdict, text),) = get_claim("fppl-ewc-forgetting").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+20.5 ")


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("dirichlet:0.05", "strong skew"),
        ("dirichlet:0.5,draw=sample", "mild"),
        ("iid", "mild"),
        ("quantity:2", "few classes"),
        ("overlap:0.6", "any"),
    ],
)
def test_splits_are_told_apart_by_their_kind(spec, kind):
    assert regime(spec) == kind


def test_a_claim_of_strong_skew_is_not_judged_by_a_mild_split(tmp_path):
    run(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0})
    run(tmp_path / "b", "l2p", {0: 40.0, 1: 50.0})
    experiments = read_experiments([tmp_path])
    assert len(get_claim("hgp-l2p").verdicts(experiments)) == 1
    assert get_claim("hgp-l2p-skew").verdicts(experiments) == []


def test_the_command_lists_and_explains(tmp_path):
    text = said("--results", str(tmp_path))
    assert "pilora-reweight" in text and "never run" in text and "2x: two such pairs say so" in text
    page = said("pilora-reweight", "--results", str(tmp_path))
    assert "A_N 68.5 (PILoRA) and 41.4 (w/o prototype re-weight)" in page
    assert "fczoo reproduce pilora/cifar100/dirichlet:0.5" in page and page.rstrip().endswith("never run")
    assert "no claim is called 'nope'" in said("nope", code=1)
    assert "leave the rest out" in said("pilora-reweight", "--run", "pilora-reweight", code=1)


def test_what_the_command_is_given_is_not_ignored(tmp_path):
    lists = [said("--paper", name, "--results", str(tmp_path)) for name in ("PILoRA", "pilora")]
    assert lists[0] == lists[1] and "pilora-joint" in lists[0] and "hgp-l2p" not in lists[0]
    for wrong, says in [
        (["hgp-l2p", "--paper", "hgp"], "leave it or hgp-l2p out"),
        (["--results", str(tmp_path / "nowhere")], f"nothing is at --results {tmp_path / 'nowhere'}"),
        (["hgp-l2p", "--results", str(tmp_path / "nowhere")], "nothing is at --results"),
        (["hgp-l2p", "--seeds", "0-4"], "--seeds and --jobs are about --run"),
    ]:
        text = said(*wrong, code=1)
        assert says in text and text.count("\n") == 1


def test_without_a_folder_of_results_every_claim_was_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"In all runs: of {ALL} claims {ALL} were never run." in said()


def test_runs_of_which_both_sides_were_tuned_are_counted_apart(tmp_path):
    low, high = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}
    run(tmp_path / "a", "pilora", high, reweight="distance")
    run(tmp_path / "b", "pilora", low, reweight="average")
    tune(tmp_path / "a", 12, ["pilora"])
    tune(tmp_path / "b", 12, ["hgp"])  # of that file, but not of that method
    text = said("--results", str(tmp_path))
    row = next(line for line in text.splitlines() if line.startswith("pilora-reweight "))
    assert row.split("+27.1")[1].split("  Proto")[0].split() == ["never", "run", "holds"]
    assert f"Where both sides were tuned: of {ALL} claims {ALL} were never run." in text
    assert f"In all runs: of {ALL} claims 1 hold, {ALL - 1} were never run." in text

    tune(tmp_path / "b", 12, ["pilora"])
    text = said("--results", str(tmp_path))
    assert f"Where both sides were tuned: of {ALL} claims 1 hold, {ALL - 1} were never run." in text


def test_a_claim_that_holds_here_and_not_there_counts_as_such(tmp_path):
    low, high = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}
    for name, better, worse, epochs in [("a", high, low, 1), ("b", low, high, 2)]:
        run(tmp_path / f"{name}-better", "pilora", better, epochs, reweight="distance")
        run(tmp_path / f"{name}-worse", "pilora", worse, epochs, reweight="average")
    text = said("--results", str(tmp_path))
    assert f"In all runs: of {ALL} claims 1 hold in some runs and not in others, {ALL - 1} were" in text


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("fcilpt-sort", "overlap:0.6"),
        ("pilora-reweight-quantity", "quantity:2"),
        ("hgp-l2p-skew", "dirichlet:0.05"),
        ("hgp-l2p", None),
    ],
)
def test_a_claim_runs_on_a_split_like_the_papers(name, split):
    assert get_claim(name).small == split


def test_run_makes_a_job_of_each_side(tmp_path, monkeypatch):
    made = {}

    def noted(jobs, out, conduct):
        made.update(jobs)
        run(out / "better", "hgp", {0: 52.0})
        run(out / "worse", "l2p", {0: 40.0})

    monkeypatch.setattr(fczoo.runner.grid, "run_grid", noted)
    text = said("--run", "hgp-l2p-skew", "--seeds", "0", "--results", str(tmp_path))
    better, worse = made[Path("better")], made[Path("worse")]
    assert (better.methods, worse.methods, better.seeds) == (("hgp",), ("l2p",), (0,))
    assert better.settings.partition == worse.settings.partition == "dirichlet:0.05"
    assert better.options["hgp"]["rebalance"] == "all"
    assert "hgp-l2p-skew: HGP beats L2P under strong skew." in text
