"""Claims: agreement with the printed numbers, and verdicts computed by hand."""

import tomllib
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

import fczoo.runner.sweep
from fczoo import create_method
from fczoo.cli.app import main
from fczoo.cli.arguments import parse_changes
from fczoo.cli.bench import bench
from fczoo.federation.settings import Settings
from fczoo.papers.claims import PlainClaim, PrintedClaim, claims, get_claim
from fczoo.papers.claims_between_settings import TwoSettingClaim
from fczoo.papers.pair_claims import has_options, regime
from fczoo.papers.reproduce import get_card
from fczoo.papers.variants import readings
from fczoo.reports.runs import read_experiments, read_runs
from fczoo.reports.suites import enter_runs
from helpers_runs import tune, write_one, write_run


def claims_output(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["claims", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_claims_file_has_only_known_keys() -> None:
    text = (files("fczoo.assets") / "claims.toml").read_text(encoding="utf-8")
    kinds = ("printed", PrintedClaim), ("across", TwoSettingClaim), ("plain", PlainClaim)
    for kind, cls in kinds:
        for claim in tomllib.loads(text)[kind]:
            assert claim.keys() <= {field.name for field in fields(cls)}, claim["name"]


ALL = sum(claim.is_runnable for claim in claims().values())
PRINTED_CLAIMS = {
    name: claim for name, claim in claims().items() if isinstance(claim, PrintedClaim)
}


@pytest.mark.parametrize(
    "name", [name for name, claim in PRINTED_CLAIMS.items() if claim.is_runnable]
)
def test_claim_agrees_with_printed_numbers(name):
    claim = PRINTED_CLAIMS[name]
    assert claim.gain > 0, "the row that is called better is not printed as better"
    rows_with_runs = [number for number in claim.numbers if not claim.source.row(number).why]
    commands = [
        command for command in claim.full_scale_commands if command.startswith("  fczoo reproduce ")
    ]
    assert len(commands) >= len(rows_with_runs), "one of its rows has no card"
    ours, theirs = claim.sides
    assert (ours.method, ours.options) != (theirs.method, theirs.options)


@pytest.mark.parametrize(
    "name", [name for name, claim in PRINTED_CLAIMS.items() if claim.is_runnable]
)
def test_claim_side_matches_runs_of_its_readings(name, tmp_path):
    claim = PRINTED_CLAIMS[name]
    for number, side in zip(claim.numbers, claim.sides, strict=True):
        for i, reading in enumerate(
            [] if claim.source.row(number).why else readings(claim.source, number)
        ):
            folder = tmp_path / f"{number.value}-{i}"
            write_run(
                folder,
                {reading.config.method: {0: 50.0}},
                reading.options,
                partition="dirichlet:0.5",
            )
            (experiment,) = read_experiments([folder])
            assert claim.matches(experiment.lines[0], side), reading.name


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, claim in claims().items()
        if claim.is_runnable and not isinstance(claim, TwoSettingClaim)
    ],
)
def test_paper_scale_commands_run_claim_sides(name):
    claim = get_claim(name)
    title, *commands = claim.full_scale_commands
    assert title.startswith("At the ") and title.endswith(":")
    for side, command in zip(claim.sides, commands, strict=True):
        program, verb, *words = command.split()
        if verb == "reproduce":
            verb, *words = get_card(words[0]).command()
        params = bench.make_context("bench", words).params
        assert (program, verb, params["methods"]) == ("fczoo", "bench", side.method)
        parts = {name: params[name] for name in ("protocol", "partition")}
        settings = Settings.for_dataset(params["dataset"], **parts)
        changes = parse_changes(params["set"]).get(side.method, {})
        options = {**settings.method_options(side.method), **changes}
        fields = asdict(create_method(side.method, settings.dataset, **options))
        assert any(
            has_options(fields, side_options)
            for side_options in (side.options, {**side.options, **side.printed_options})
        )


def test_printed_claims_cover_all_papers():
    assert sum(claim.is_runnable for claim in PRINTED_CLAIMS.values()) >= 40
    assert {claim.paper for claim in PRINTED_CLAIMS.values()} == {"pilora", "hgp", "fcilpt", "fppl"}


@pytest.mark.parametrize(
    "name", [name for name, claim in claims().items() if isinstance(claim, PlainClaim)]
)
def test_plain_claim_compares_two_methods(name, tmp_path):
    empty = "--results", str(tmp_path)
    claim = get_claim(name)
    assert isinstance(claim, PlainClaim)
    assert claim.is_runnable
    assert claim.by
    methods = [create_method(side.method, **side.options) for side in claim.sides]
    assert methods[0] != methods[1]
    assert f"{claim.by}; {claim.figure}." in claims_output(name, *empty)
    assert name in claims_output(*empty)
    assert name not in claims_output("--paper", "hgp", *empty)


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
def test_regime_classifies_partitions(spec, kind):
    assert regime(spec) == kind


def test_claims_command_lists_and_explains(tmp_path):
    text = claims_output("--results", str(tmp_path))
    assert "pilora-reweight" in text
    assert "not run here" in text
    assert "2x means two such pairs" in text
    page = claims_output("pilora-reweight", "--results", str(tmp_path))
    assert "A_N 68.5 (PILoRA) and 41.4 (w/o prototype re-weight)" in page
    assert "fczoo reproduce pilora/cifar100/dirichlet:0.5" in page
    assert page.rstrip().endswith("not run here")
    assert "no claim is called 'nope'" in claims_output("nope", code=1)
    assert "--run CLAIM cannot be combined with NAME or --paper" in claims_output(
        "pilora-reweight", "--run", "pilora-reweight", code=1
    )


def test_claims_command_filters_papers_and_rejects_unused_options(tmp_path):
    lists = [
        claims_output("--paper", name, "--results", str(tmp_path)) for name in ("PILoRA", "pilora")
    ]
    assert lists[0] == lists[1]
    assert "pilora-joint" in lists[0]
    assert "hgp-l2p" not in lists[0]
    for wrong, says in [
        (["hgp-l2p", "--paper", "hgp"], "leave out --paper or hgp-l2p"),
        (
            ["--results", str(tmp_path / "nowhere")],
            f"--results {tmp_path / 'nowhere'} does not exist",
        ),
        (
            ["hgp-l2p", "--results", str(tmp_path / "nowhere")],
            "nowhere does not exist; give a folder",
        ),
        (["hgp-l2p", "--seeds", "0-4"], "--seeds and --jobs need --run"),
    ]:
        text = claims_output(*wrong, code=1)
        assert says in text and text.count("\n") == 1


def test_claims_without_results_folder_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"In all runs: of {ALL} claims {ALL} were not run here." in claims_output()


def test_claims_with_tuned_sides_are_counted_separately(tmp_path):
    low, high = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}
    write_one(tmp_path / "a", "pilora", high, reweight="distance")
    write_one(tmp_path / "b", "pilora", low, reweight="equal")
    tune(tmp_path / "a", 12, ["pilora"])
    tune(tmp_path / "b", 12, ["hgp"])  # of that file, but not of that method
    text = claims_output("--results", str(tmp_path))
    row = next(line for line in text.splitlines() if line.startswith("pilora-reweight "))
    assert row.split("+27.1")[1].split("  Proto")[0].split() == ["not", "run", "here", "holds"]
    assert f"Where both sides were tuned: of {ALL} claims {ALL} were not run here." in text
    assert f"In all runs: of {ALL} claims 1 hold, {ALL - 1} were not run here." in text

    tune(tmp_path / "b", 12, ["pilora"])
    text = claims_output("--results", str(tmp_path))
    assert (
        f"Where both sides were tuned: of {ALL} claims 1 hold, {ALL - 1} were not run here." in text
    )


def test_claim_with_mixed_verdicts_is_counted_separately(tmp_path):
    low, high = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}
    for name, better, worse, epochs in [("a", high, low, 1), ("b", low, high, 2)]:
        write_one(tmp_path / f"{name}-better", "pilora", better, epochs, reweight="distance")
        write_one(tmp_path / f"{name}-worse", "pilora", worse, epochs, reweight="equal")
    text = claims_output("--results", str(tmp_path))
    assert (
        f"In all runs: of {ALL} claims 1 hold in some runs and not in others, {ALL - 1} were"
        in text
    )


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("fcilpt-sort", "overlap:0.6"),
        ("pilora-reweight-quantity", "quantity:2"),
        ("hgp-l2p-skew", "dirichlet:0.05"),
        ("hgp-l2p", None),
    ],
)
def test_small_run_uses_partition_like_paper(name, split):
    assert get_claim(name).digits_partition == split


def test_run_option_runs_both_sides(tmp_path, monkeypatch):
    runs = {}

    def record_sweep(sweep, out, execution):
        runs.update(sweep)
        write_one(out / "better", "hgp", {0: 52.0})
        write_one(out / "worse", "l2p", {0: 40.0})

    monkeypatch.setattr(fczoo.runner.sweep, "run_sweep", record_sweep)
    text = claims_output("--run", "hgp-l2p-skew", "--seeds", "0", "--results", str(tmp_path))
    (better,), (worse,) = runs[Path("better")], runs[Path("worse")]
    assert (better.method, worse.method, better.seed) == ("hgp", "l2p", 0)
    assert better.settings.partition == worse.settings.partition == "dirichlet:0.05"
    assert better.options["rebalance"] == "all"
    assert "hgp-l2p-skew: HGP beats L2P under strong skew." in text


def test_claims_read_only_suites_if_present(tmp_path):
    """Judge claims only by rows of suites if the results have suites."""
    low, high = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}
    write_one(tmp_path / "a", "pilora", high, reweight="distance")
    write_one(tmp_path / "b", "pilora", low, reweight="equal")
    assert "1 hold" in claims_output("--results", str(tmp_path))
    (tmp_path / "suites").mkdir()
    rows = (
        '[[rows]]\nmethod = "pilora"\n[[rows]]\nmethod = "pilora"\nrole = "ablation"\nname = "e"\n'
    )
    (tmp_path / "suites/one.toml").write_text(f'question = "?"\n[bench]\n{rows}')
    text = claims_output("--results", str(tmp_path))
    assert f"In all runs: of {ALL} claims {ALL} were not run here." in text
    verdicts = {}
    for label, folder in (("pilora", "a"), ("e", "b")):
        (runs,) = read_runs([tmp_path / folder])
        for record in runs.records:
            verdicts[f"{label}/seed{record.seed}"] = replace(runs, records=(record,))
    enter_runs(tmp_path / "one.csv", verdicts)
    text = claims_output("--results", str(tmp_path))
    assert f"In all runs: of {ALL} claims 1 hold, {ALL - 1} were not run here." in text
