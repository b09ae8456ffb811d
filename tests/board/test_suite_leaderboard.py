"""The leaderboard of suites: questions, declared rows, and ranks at equal bytes and compute."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fczoo.board.ranks import borda
from fczoo.cli.app import main
from fczoo.reports.runs import read_runs
from fczoo.reports.suites import enter_runs
from helpers_browser import cells, needs_browser, serve_site
from helpers_runs import write_run

ROWS = """
[[rows]]
method = "hgp"
[[rows]]
method = "ewc"
[[rows]]
method = "fedavg"
role = "control"
[[rows]]
method = "lwf"
name = "lwf late"
role = "ablation"
"""
COSTS = {"hgp": (300, 10.0), "ewc": (100, 20.0), "fedavg": (200, 30.0), "lwf": (100, 10.0)}
"""Bytes and seconds of each method's run."""


def write_suite(root: Path, name: str, scores: dict[str, dict[int, float]], **more: Any) -> None:
    """Write the file of a suite, and its archive from a small run folder."""
    suites = root / "results/suites"
    suites.mkdir(parents=True, exist_ok=True)
    head = f'question = "What does {name} ask?"\ncompare = [["hgp", "ewc"]]\n'
    (suites / f"{name}.toml").write_text(f'{head}[bench]\ndataset = "digits"\n{ROWS}')
    write_run(root / "runs" / name, scores, **more)
    for file in (root / "runs" / name).rglob("result.json"):
        content = json.loads(file.read_text())
        sent, seconds = COSTS[content["method"]]
        file.write_text(json.dumps({**content, "bytes_up": sent, "seconds": seconds}))
    found = {}
    for runs in read_runs([root / "runs" / name]):
        for record in runs.records:
            label = "lwf late" if record.method == "lwf" else record.method
            found[f"{label}/seed{record.seed}"] = replace(runs, records=(record,))
    enter_runs(root / "results" / f"{name}.csv", found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site of two suites with runs, and of one without."""
    root = tmp_path_factory.mktemp("suites")
    first = {"hgp": 70.0, "ewc": 60.0, "fedavg": 50.0, "lwf": 90.0}
    second = {"hgp": 40.0, "ewc": 50.0, "fedavg": 30.0}

    def add(scores: dict[str, float]) -> dict[str, dict[int, float]]:
        return {name: {0: score, 1: score + 1} for name, score in scores.items()}

    write_suite(root, "first", add(first))
    write_suite(root, "second", add(second), partition="dirichlet:0.1")
    text = (root / "results/suites/first.toml").read_text()
    (root / "results/suites/third.toml").write_text(text.replace("What does first", "What next"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        outcome = CliRunner().invoke(main, ["leaderboard", "--out", "site"])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout == "2 suites written to site/index.html\n"
    return root / "site"


def test_start_page_lists_questions(site: Path) -> None:
    rows = cells(site / "index.html", "suites")
    assert [row[0].partition("?")[0] for row in rows] == [
        "What does first ask",
        "What does second ask",
        "What next ask",
    ]
    assert [row[1:] for row in rows] == [
        ["hgp, 75.2", "2", "2"],
        ["ewc, 65.2", "2", "2"],
        ["–", "–", "–"],
    ]
    assert "not run yet" in rows[2][0]
    text = (site / "index.html").read_text()
    assert 'href="first.html#b0"' in text
    assert {path.name for path in site.iterdir()} == {"index.html", "first.html", "second.html"}


def test_methods_are_ranked_by_declared_rows(site: Path) -> None:
    """Rank three rows, without the ablation, which has the highest accuracy.

    By A_N, hgp and ewc are first and second once each: (2 + 1) / 4 of the points. hgp sends most,
    so it beats no method at equal bytes: hgp has (0.5 + 0.5 + 0 + 0.5) / 4, ewc has
    (0.5 + 1 + 1 + 1) / 4 and fedavg has (0.5 + 0 + 0.5 + 0) / 4. At equal compute hgp has
    (1 + 1 + 0.5 + 1) / 4, ewc has (0 + 1 + 0.5 + 1) / 4 and fedavg has 0.
    """
    rows = cells(site / "index.html", "ranks")
    assert [row[:6] for row in rows] == [
        ["hgp", "1", "75.0", "2", "1", "2"],
        ["ewc", "1", "75.0", "1", "2", "2"],
        ["fedavg", "3", "0.0", "3", "3", "2"],
    ]
    text = (site / "index.html").read_text()
    assert re.search(r'data-label="fedavg" data-role="control"', text)
    assert "lwf" not in text


def test_borda_at_equal_costs_counts_unordered_pairs_as_ties() -> None:
    scores = [{"a": 3.0, "b": 2.0, "c": 1.0}]
    costs = [{"a": ("x", 2.0), "b": ("x", 1.0), "c": ("y", 1.0)}]
    shares = {name: entry.share for name, entry in borda(scores, costs).items()}
    assert shares == {"a": 50.0, "b": 50.0, "c": 50.0}
    costs = [{"a": ("x", 1.0), "b": ("x", 1.0), "c": ("x", 0.0)}]
    shares = {name: entry.share for name, entry in borda(scores, costs).items()}
    assert shares == {"a": 75.0, "b": 25.0, "c": 50.0}


def test_suite_page_has_question_tests_and_rows(site: Path) -> None:
    text = (site / "first.html").read_text()
    assert "What does first ask?" in text
    same = "(not tested: the difference is the same for every seed)"
    assert f"HGP is 5.0 points above EWC {same}." in text
    assert [row[0] for row in cells(site / "first.html", "methods")] == [
        "lwf late",
        "hgp",
        "ewc",
        "fedavg",
    ]
    assert '<input type="checkbox" name="ablations">' in text
    roles = dict(re.findall(r'<tr data-label="([^"]+)" data-colour="\d+" data-role="(\w+)"', text))
    assert roles == {"lwf late": "ablation", "hgp": "method", "ewc": "method", "fedavg": "control"}


@pytest.mark.browser
@needs_browser
def test_ablations_are_hidden_until_selected(site: Path, tmp_path: Path) -> None:
    with serve_site(site, tmp_path) as browser:
        answers = browser.ask(
            "first.html",
            """
            const rows = () => [...document.querySelectorAll("table.sortable tbody tr")]
                .filter(row => !row.hidden).map(row => row.dataset.label);
            const out = {start: rows()}, box = document.querySelector("[name=ablations]");
            box.click(); out.all = rows();
            const colour = label => window.getComputedStyle(
                document.querySelector(`tr[data-label="${label}"] td`)).color;
            out.grey = colour("fedavg") !== colour("ewc");
            return out;
            """,
        )
        assert browser.complaints("first.html") == browser.complaints("index.html") == []
    assert answers["start"] == ["hgp", "ewc", "fedavg"]
    assert answers["all"] == ["lwf late", "hgp", "ewc", "fedavg"]
    assert answers["grey"]
