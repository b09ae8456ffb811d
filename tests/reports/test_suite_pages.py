"""Suites in results/: their files are valid, and their pages are generated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fczoo.board.suite_page import Page, curve_colours, read_page, suite_curves
from fczoo.board.suite_text import rank_sentence
from fczoo.reports.drawing import draw
from fczoo.reports.runs import read_experiments
from fczoo.reports.significance import CriticalDifference
from fczoo.reports.suites import SUITES, Suite, SuiteRow, read_suite
from helpers_cli import run
from helpers_results import RESULTS
from helpers_runs import write_run

FILES = sorted((RESULTS / SUITES).glob("*.toml"))
NAMES = [file.stem for file in FILES]
WITH_PAGE = [name for name in NAMES if (RESULTS / f"{name}.md").is_file()]
TRAINED = {"pilora", "hgp", "fcilpt", "fppl"}
BASELINES = {"ewc", "lwf", "l2p", "dualprompt", "codap", "fedproto", "ccvr", "glfc"}
CONTROLS = {"fedavg", "fedncm", "local", "joint", "fedclm"}


def test_results_have_known_suites():
    assert NAMES == ["ablations", "cifar100", "digits", "frozen", "skew", "tinyimagenet"]


@pytest.mark.parametrize("name", NAMES)
def test_suite_status_lists_every_row(name: str):
    """List every row of the suite's file with its label."""
    suite = read_suite(RESULTS / SUITES / f"{name}.toml")
    text = run("suite", "status", name, "--no-estimate", "--results", str(RESULTS))
    assert text.startswith(f"{name}: {suite.question}\n")
    assert suite.question.endswith("?")
    rows = [line for line in text.splitlines() if line.split("  ")[0] in _labels(name)]
    settings = suite.bench.get("partition", "")
    assert len(rows) == len(suite.rows) * (len(settings) if isinstance(settings, list) else 1)
    roles = {row.method: row.role for row in suite.rows if row.role != "ablation"}
    assert {method for method, role in roles.items() if role == "control"} <= CONTROLS
    assert roles.keys() & CONTROLS == {m for m, role in roles.items() if role == "control"}


def _labels(name: str) -> set[str]:
    return {row.label for row in read_suite(RESULTS / SUITES / f"{name}.toml").rows}


def test_large_suites_have_expected_methods():
    more = {"fedlora", "slca", "ranpac", "afcl", "stsae", "lorm", "afc", "local", "joint"}
    more |= {"affcl", "uopp", "powder", "fedcbdr", "fppl untrained", "fcilpt untrained"}
    more |= {"fcilpt unsorted", "fcilpt small start"}
    more |= {"fedavg head only", "fedavg with ewc rates", "fedavg with slca rates"}
    assert _labels("cifar100") == TRAINED | BASELINES | {"fedavg", "fedncm"} | more
    assert _labels("skew") == TRAINED | {"fedavg", "fedncm", "fedavg with slca rates"}
    assert _labels("tinyimagenet") == TRAINED | {
        "fedavg",
        "fedncm",
        "joint",
        "fedavg with slca rates",
    }


@pytest.mark.parametrize("name", WITH_PAGE)
def test_page_is_generated_from_rows_and_notes(name: str):
    page = read_page(name, read_suite(RESULTS / SUITES / f"{name}.toml"), RESULTS)
    written = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert (RESULTS / f"pictures/{name}-1.png").is_file()
    assert replace(page, pictures=True).text == written


def test_many_curves_name_controls_compared_and_highest_rows():
    pytest.importorskip("matplotlib")
    suite = read_suite(RESULTS / SUITES / "digits.toml")
    (experiment,) = read_page("digits", suite, RESULTS).experiments
    curves = suite_curves(experiment, suite)
    named = curves.curves.keys() - curves.background
    a_n = {
        line.label: np.mean([r.metrics["A_N"] for r in line.results]) for line in experiment.lines
    }
    highest = sorted(a_n.keys() - CONTROLS, key=a_n.__getitem__)[-3:]
    assert named == {"hgp", "pilora", "fppl", "fcilpt", *CONTROLS, *highest}
    legend = draw(curves).axes[0].get_legend_handles_labels()[1]
    assert legend[:-1] == sorted(named, key=a_n.__getitem__, reverse=True)
    assert legend[-1] == f"others ({len(experiment.lines) - len(named)})"
    colours = [line.get_color() for line in draw(curves).axes[0].lines]
    assert colours.count("0.75") == len(curves.background)
    assert colours.count("black") == len(CONTROLS)


def test_curves_of_suite_have_same_colours_and_no_ablations():
    suite = read_suite(RESULTS / SUITES / "cifar100.toml")
    (experiment,) = read_page("cifar100", suite, RESULTS).experiments
    curves = suite_curves(experiment, suite)
    assert "fppl untrained" in {line.label for line in experiment.lines}
    assert "fppl untrained" not in curves.curves
    # methods of ``compare``, then others, both in the order of the suite; no control
    colours = curve_colours(suite, curves.curves.keys() - curves.background)
    assert list(colours)[:4] == ["pilora", "hgp", "fppl", "fcilpt"]
    assert list(colours.values()) == list(range(len(colours)))
    assert not colours.keys() & CONTROLS


def test_few_curves_are_all_named():
    suite = read_suite(RESULTS / SUITES / "digits.toml")
    (experiment,) = read_page("digits", suite, RESULTS).experiments
    few = replace(experiment, lines=experiment.lines[:12])
    assert not suite_curves(few, suite).background


def test_wide_critical_difference_has_no_picture():
    """Three rows: 1.3 of at most 2 ranks still separates them, 1.4 does not."""
    ranks = CriticalDifference({"hgp": 1.0, "fedavg": 2.2, "ewc": 2.8}, 1.3, p=0.01, blocks=9)
    assert "1.3 ranks (Nemenyi, 5 %); the largest possible difference is 2." in rank_sentence(ranks)
    assert "bars overlap" in rank_sentence(ranks)
    wide = replace(ranks, distance=1.4)
    assert not wide.is_informative
    assert "the page has no diagram" in rank_sentence(wide)


def test_page_reports_significance(tmp_path: Path) -> None:
    # A_N is the mean of the accuracy given and 80: differences of HGP to FedAvg 5.0, 5.5, 6.0
    # (t = 19.05, p = 0.00274), to EWC 0.5, -0.5, 1.5 (t = 0.866, p = 0.478)
    write_run(
        tmp_path / "run",
        {
            "hgp": {0: 70.0, 1: 71.0, 2: 72.0},
            "fedavg": {0: 60.0, 1: 60.0, 2: 60.0},
            "ewc": {0: 69.0, 1: 72.0, 2: 69.0},
        },
    )
    suite = Suite(
        question="Which?",
        bench={},
        rows=[SuiteRow("hgp"), SuiteRow("fedavg"), SuiteRow("ewc")],
        compare=[("fedavg", "hgp"), ("hgp", "ewc")],
    )
    text = Page("which", suite, read_experiments([tmp_path])).text
    assert "p values corrected for 2 comparisons (Holm)" in text
    # half widths 4.303 * 0.5 / sqrt(3) = 1.242 and 4.303 * 1.0 / sqrt(3) = 2.484
    first = "- HGP is significantly better than FedAvg (p = 0.0055; 5.5 points, 95 % interval"
    assert f"{first} 4.3 to 6.7)." in text
    second = "- HGP and EWC do not differ significantly (p = 0.48; 0.5 points, 95 % interval"
    assert f"{second} -2.0 to 3.0)." in text
    # 75, 75.5 and 76: mean 75.5, half width 4.303 * 0.5 / sqrt(3) = 1.242
    assert "74.3 to 76.7" in text
    # HGP is first, second and first; k = 3 rows and 3 seeds: 2.343 * sqrt(3 * 4 / (6 * 3)) = 1.91
    assert "Mean ranks of 3 rows over 3 combinations of seed and setting" in text
    ranks = Page("which", suite, read_experiments([tmp_path])).critical_difference
    assert ranks.ranks["hgp"] == 4 / 3
    assert round(ranks.distance, 2) == 1.91


def test_page_says_that_one_seed_is_not_tested(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"hgp": {0: 70.0}, "fedavg": {0: 60.0}})
    rows = [SuiteRow("hgp"), SuiteRow("fedavg")]
    suite = Suite("Which?", {}, rows, compare=[("fedavg", "hgp")])
    text = Page("which", suite, read_experiments([tmp_path])).text
    # A_N is the mean of the accuracy given and 80
    sentence = "- HGP is 5.0 points above FedAvg (not tested: one seed)."
    assert f"Differences of A_N:\n\n{sentence}" in text
    assert "p values" not in text


def test_rank_figure_needs_three_blocks_without_ablation(tmp_path: Path) -> None:
    seeds = {0: 70.0, 1: 71.0}
    scores = {"hgp": seeds, "fedavg": seeds, "ewc": seeds, "lwf": {**seeds, 2: 70.0}}
    write_run(tmp_path / "run", scores)
    rows = [SuiteRow("hgp"), SuiteRow("fedavg"), SuiteRow("ewc")]
    suite = Suite("Which?", {}, [*rows, SuiteRow("lwf", role="ablation")])
    page = Page("which", suite, read_experiments([tmp_path]))
    assert page.critical_difference is None
    assert "## Ranks" not in page.text
