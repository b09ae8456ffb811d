"""Tables over several data sets and settings, as papers print them."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from helpers_cli import run
from helpers_runs import write_run

ONE_SEED = [
    ("digits", 1, {"hgp": {0: 70.0}, "codap": {0: 60.0}, "ewc": {0: 50.0}}),
    ("digits", 2, {"hgp": {0: 74.0}, "codap": {0: 76.0}}),
    ("cifar100", 1, {"hgp": {0: 40.0}, "codap": {0: 42.0}, "ewc": {0: 10.0}}),
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Write runs of three tables; EWC has no run in one of them."""
    for number, (dataset, rounds, methods) in enumerate(ONE_SEED):
        write_run(tmp_path / f"run{number}", methods, dataset=dataset, rounds=rounds)
    return tmp_path


def test_latex_has_grouped_headers_marks_and_rules(runs: Path) -> None:
    text = run(
        "report", str(runs), "--columns", "data,rounds", "--metrics", "A_N", "--format", "latex",
        "--rows", "ewc,codap,hgp", "--group",
    )  # fmt: skip
    lines = text.splitlines()
    start = lines.index(r"\toprule")
    # A_N over 10 + 10 test images is the mean of the given accuracy and 80 %
    assert lines[start + 1 : lines.index(r"\bottomrule")] == [
        r" & \multicolumn{2}{c}{digits} & \multicolumn{1}{c}{cifar100} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}",
        r" & \multicolumn{1}{c}{rounds 1} & \multicolumn{1}{c}{rounds 2} & \multicolumn{1}{c}{rounds 1} \\",
        r"\cmidrule(lr){2-2} \cmidrule(lr){3-3} \cmidrule(lr){4-4}",
        r"Method & A\_N $\uparrow$ & A\_N $\uparrow$ & A\_N $\uparrow$ \\",
        r"\midrule",
        r"EWC & 65.0 & -- & 45.0 \\",
        r"CODA-P & \underline{70.0} & \textbf{78.0} & \textbf{61.0} \\",
        r"\midrule",
        r"HGP & \textbf{75.0} & \underline{77.0} & \underline{60.0} \\",
    ]
    assert r"\label{tab:fczoo}" in lines
    caption = next(line for line in lines if line.startswith(r"\caption{"))
    assert r"vit\_nano\_32; 2 clients; " in caption
    assert "One seed." in caption
    assert "1 epoch." in caption
    assert "round" not in caption  # rounds are in the header


def test_several_seeds_print_deviation_and_test(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"hgp": {0: 70.0, 1: 72.0}, "pilora": {0: 60.0, 1: 70.0}})
    text = run(
        "report", str(tmp_path), "--columns", "data", "--metrics", "A_N", "--format", "latex"
    )
    # 75 and 76: standard deviation sqrt(1 / 2); 70 and 75: sqrt(25 / 2); p = 0.374 by hand
    assert r"HGP & \textbf{75.5} {\tiny $\pm$ 0.7} \\" in text
    assert r"PILoRA & \underline{72.5} {\tiny $\pm$ 3.5}$^{\approx}$ \\" in text
    assert r"Mean $\pm$ standard deviation over 2 seeds" in text
    assert r"$\approx$ not significantly different from the best in a paired t test" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(runs: Path, tmp_path: Path) -> None:
    table = run("report", str(runs), "--columns", "data,rounds", "--format", "latex")
    source = "\n".join(
        [r"\documentclass{article}\usepackage{booktabs}\begin{document}", table, r"\end{document}"]
    )
    (tmp_path / "table.tex").write_text(source, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


def test_text_and_markdown_have_same_numbers(runs: Path) -> None:
    plain = run("report", str(runs), "--columns", "data,rounds", "--rows", "hgp")
    assert [line.split() for line in plain.splitlines()[:3]] == [
        ["method", "digits", "digits", "digits", "digits", "cifar100", "cifar100"],
        ["rounds", "1", "rounds", "1", "rounds", "2", "rounds", "2", "rounds", "1", "rounds", "1"],
        ["A_N", "Avg", "A_N", "Avg", "A_N", "Avg"],
    ]
    marked = run(
        "report", str(runs), "--columns", "data,rounds", "--metrics", "A_N", "--format", "markdown"
    )
    assert "digits / rounds 1 / A_N" in marked
    assert "**75.0**" in marked


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--columns", "data"], "two experiments are for digits but differ in rounds"),
        (["--columns", "dta,rounds"], "no setting is called 'dta'"),
        (
            ["--columns", "data,rounds", "--rows", "hpg"],
            "no run has method 'hpg'; did you mean hgp",
        ),
        (["--columns", "data,rounds", "--metrics", "A_M"], "no metric is called 'A_M'"),
        (["--columns", ","], "--columns is empty; give one or more entries"),
        (["--rows", "hgp"], "--rows and --group need --columns"),
        (["--columns", "data", "--format", "csv"], "--columns prints text, markdown or latex"),
    ],
)
def test_invalid_table_options_are_rejected(runs: Path, options: list[str], problem: str) -> None:
    outcome = CliRunner().invoke(main, ["report", str(runs), *options])
    assert outcome.exit_code != 0
    assert problem in str(outcome.exception) + outcome.output
