"""Test README: its methods, its links on a package index, and its citation."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fczoo.core.registry import METHODS
from helpers_cli import run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
URL = "https://example.org/group/fczoo"


def absolute_links(repository: str | None) -> str:
    """Return README as the release tool packs it."""
    spec = importlib.util.spec_from_file_location("release_tool", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text: str = tool.absolute_links(TEXT, repository, "1.2.3")
    return text


def test_table_has_every_method() -> None:
    rows = re.findall(r"^\| .*`.*$", TEXT, flags=re.MULTILINE)
    names = set(re.findall(r"`(\w+)`", "\n".join(rows)))
    own_methods = {*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")}
    assert own_methods <= names


def test_readme_links_work_on_package_index() -> None:
    """Leave no relative link, and no picture without an address."""
    with_address, without = absolute_links(URL), absolute_links(None)
    targets = re.findall(r"\]\(([^)]*)\)", with_address)
    assert len(targets) > 30
    assert all(target.startswith(("https://", "#")) for target in targets)
    files = [t.partition(f"{URL}/")[2].partition("/v1.2.3/")[2] for t in targets if URL in t]
    assert all((ROOT / file).exists() for file in files)
    assert f"![Accuracy over all classes seen, after each of ten tasks]({URL}/raw/" in with_address
    assert "![" not in without
    assert "](docs/" not in without


def test_readme_sections_are_in_order() -> None:
    parts = ("![", "fczoo bench", "fczoo predict", "## Install", "## What there is", "## Why not")
    places = [TEXT.index(part) for part in (*parts, "## Cite", "## Handbook")]
    assert places == sorted(places)
    assert "whl/cpu" in TEXT
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    line = next(line for line in TEXT.splitlines() if line.startswith("pip install '.[plot]'"))
    assert {*extras["optional-dependencies"]} - {"test", "docs", "dev"} <= set(
        re.findall(r"\w+", line)
    )


def test_citation_title_matches_citation_file() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    title = re.findall(r'^  title: "(.*)"$', citation, flags=re.MULTILINE)[0]
    assert f"title = {{{title}}}" in TEXT


def test_digits_table_matches_output_of_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command below the table; no row but joint training is above class means."""
    monkeypatch.chdir(ROOT)
    command = re.findall(
        r"^fczoo (report results/digits.csv (?:.*\\\n)*.*)$", TEXT, flags=re.MULTILINE
    )
    table = run(*shlex.split(command[0].replace("\\\n", " "))).partition("\n\n")[0]
    assert table in TEXT
    a_n = {row.split()[1]: float(re.findall(r"\d+\.\d", row)[0]) for row in table.splitlines()[2:]}
    assert [name for name, value in a_n.items() if value > a_n["FedNCM"]] == ["Joint"]
    assert len(a_n) == 16
