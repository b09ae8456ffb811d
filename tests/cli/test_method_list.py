"""Test ``fczoo list methods`` and its table of facts about methods."""

import runpy
from pathlib import Path

import pytest

from fczoo.cli import listing
from fczoo.cli.listing import GROUPS, list_methods, read_facts
from fczoo.core.registry import METHODS
from helpers_cli import run

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "method_facts.py"))
BUILTIN_METHODS = [*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")]


def rows_by_group() -> dict[str, dict[str, str]]:
    """Return the printed rows by group and method."""
    headings, rows, group = {heading: key for key, heading in GROUPS.items()}, {}, ""
    for line in run("list", "methods").splitlines():
        group = headings.get(line, group)
        if line.startswith("  "):
            rows.setdefault(group, {})[line.split()[0]] = line
    return rows


def test_every_method_is_listed_once_in_its_group() -> None:
    rows = rows_by_group()
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
            "fedavg 2017 network, head weights 4,823.6 Sequential federated training",
        ),
        (
            "exemplars",
            "glfc",
            "glfc 2022 network, head weights, gradients 4,823.6 Exemplars, balanced",
        ),
        (
            "analytic",
            "fedlda",
            "fedlda 2023 nothing counts, means, moments 68.1 Nearest class mean",
        ),
        ("analytic", "fedncm", "fedncm 2023 nothing counts, means 1.0 Nearest class mean"),
        ("bounds", "joint", "joint - network, head weights 4,823.6 Upper bound: each task"),
    ],
)
def test_row_shows_year_trained_parts_uploads_and_bytes(group: str, name: str, words: str) -> None:
    """Show year, trained parts, uploads and bytes of a method.

    FedNCM sends two class sums of 128 numbers and two counts in digits' first task: 1,032 bytes.
    """
    assert " ".join(rows_by_group()[group][name].split()).startswith(words)


def test_every_description_ends_with_full_stop() -> None:
    head, *lines = run("list", "methods").splitlines()
    assert head.split()[-1] == "description"
    assert all(line.endswith(".") for line in lines)


def test_list_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "columns", lambda: 80)
    lines = list_methods().splitlines()
    assert max(map(len, lines)) <= 80 and "..." not in "".join(lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("  lga "))
    assert lines[start : start + 2] == [
        "  lga         2023  network, head     weights, counts, means,            4,823.6",
        "                                      variances, gradients",
    ]


def test_unmeasured_method_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: facts for name, facts in read_facts().items() if name != "ewc"}
    monkeypatch.setattr(listing, "read_facts", lambda: table)
    lines = list_methods().splitlines()
    (line,) = [line for line in lines if line.startswith("  ewc ")]
    assert line.split()[:5] == ["ewc", "-", "?", "?", "?"]
    assert lines.index(line) > lines.index(GROUPS["baselines"])
    assert "?: not measured; the method is newer than this table or from a plug-in." in lines


def test_facts_cover_all_builtin_methods() -> None:
    assert list(read_facts()) == BUILTIN_METHODS, "run python benchmarks/method_facts.py"


@pytest.mark.parametrize("name", BUILTIN_METHODS)
def test_facts_match_method(name: str) -> None:
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
def test_year_of_citation(citation: str, year: str) -> None:
    assert SCRIPT["year_of"](citation) == year
