"""``fczoo list methods``, and its table against the methods themselves."""

import runpy
from pathlib import Path

import pytest

from fczoo.cli import listing
from fczoo.cli.listing import GROUPS, list_methods, read_facts
from fczoo.core.registry import METHODS
from helpers_cli import run

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "method_facts.py"))
OWN = [*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")]


def by_group() -> dict[str, dict[str, str]]:
    """Return the printed rows by group and method."""
    headings, rows, group = {heading: key for key, heading in GROUPS.items()}, {}, ""
    for line in run("list", "methods").splitlines():
        group = headings.get(line, group)
        if line.startswith("  "):
            rows.setdefault(group, {})[line.split()[0]] = line
    return rows


def test_every_method_is_listed_once_in_its_group() -> None:
    rows = by_group()
    assert sorted(name for group in rows.values() for name in group) == METHODS.names()
    assert list(rows["methods"]) == ["fcilpt", "fppl", "hgp", "pilora"]
    assert list(rows["exemplars"]) == [
        *("afc", "bic", "dde", "dytox", "fedcbdr", "geodl", "glfc", "icarl", "lga", "lucir"),
        *("podnet", "ssil"),
    ]
    assert list(rows["analytic"]) == [
        *("afcl", "fecam", "fedcof", "fedlda", "fedncm", "fedridge", "ranpac", "stsa", "stsae")
    ]
    assert list(rows["bounds"]) == ["joint"]


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        (
            "methods",
            "hgp",
            "hgp 2024 prompts, head weights, counts, means, variances 519.2 Clients train",
        ),
        (
            "baselines",
            "fedavg",
            "fedavg 2017 network, head weights 4,823.6 Plain federated training",
        ),
        ("exemplars", "glfc", "glfc 2022 network, head weights, gradients 4,823.6 Clients keep"),
        (
            "analytic",
            "fedlda",
            "fedlda 2023 nothing counts, means, moments 68.1 Nearest class mean",
        ),
        ("analytic", "fedncm", "fedncm 2023 nothing counts, means 1.0 Nearest class mean"),
        ("bounds", "joint", "joint - network, head weights 4,823.6 At every task,"),
    ],
)
def test_a_row_has_year_trained_sent_and_bytes(group: str, name: str, words: str) -> None:
    """Show year, trained parts, uploads and bytes of a method.

    FedNCM sends two class sums of 128 numbers and two counts in digits' first task: 1,032 bytes.
    """
    assert " ".join(by_group()[group][name].split()).startswith(words)


def test_every_line_is_whole() -> None:
    head, *lines = run("list", "methods").splitlines()
    assert head.split()[-1] == "description"
    assert all(line.endswith(".") for line in lines)


def test_the_list_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "columns", lambda: 80)
    lines = list_methods().splitlines()
    assert max(map(len, lines)) <= 80 and "..." not in "".join(lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("  lga "))
    assert lines[start : start + 2] == [
        "  lga         2023  network, head     weights, counts, means,            4,823.6",
        "                                      variances, gradients",
    ]


def test_a_method_without_a_row_is_listed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: facts for name, facts in read_facts().items() if name != "ewc"}
    monkeypatch.setattr(listing, "read_facts", lambda: table)
    lines = list_methods().splitlines()
    (line,) = [line for line in lines if line.startswith("  ewc ")]
    assert line.split()[:5] == ["ewc", "-", "?", "?", "?"]
    assert lines.index(line) > lines.index(GROUPS["baselines"])
    assert "?: not measured, because the method is newer or from a plug-in." in lines


def test_the_table_has_the_methods_of_this_repository() -> None:
    assert list(read_facts()) == OWN, "run python benchmarks/method_facts.py"


@pytest.mark.parametrize("name", OWN)
def test_the_table_agrees_with_the_method(name: str) -> None:
    assert read_facts()[name] == SCRIPT["facts_of"](name), "run python benchmarks/method_facts.py"


@pytest.mark.parametrize(
    ("citation", "year"),
    [
        ("Kirkpatrick et al., PNAS 2017; online form: Schwarz et al., ICML 2018", "2017"),
        ("discriminant analysis (Fisher, 1936) from sums; form of FeCAM, NeurIPS 2023", "2023"),
        ("Salami et al. (arXiv 2406.02447)", "2024"),
        ("AFL, CVPR 2025; AFCL, arXiv 2505.12245", "2025"),
        ("upper bound of HGP", ""),
    ],
)
def test_year_of_a_citation(citation: str, year: str) -> None:
    assert SCRIPT["year_of"](citation) == year
