"""Test that generated pages in the repository match the code."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from fczoo.cli.app import main
from fczoo.cli.listing import read_facts

DOCS = Path(__file__).parents[2] / "docs"
UPDATE_HINT = "run python docs/reference.py"
Import = Callable[[str], ModuleType]


def rows_of_methods() -> dict[str, list[str]]:
    """Return the cells of each row of the page of methods by method."""
    lines = (DOCS / "methods.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].partition("]")[0].strip("["): row for row in cells}


def test_methods_page_lists_each_method_once() -> None:
    assert list(rows_of_methods()) == list(read_facts()), UPDATE_HINT


@pytest.mark.parametrize("name", ["fedncm", "hgp", "target", "mfcl", "glfc", "local", "powder"])
def test_methods_page_row_matches_method(name: str, docs_module: Import) -> None:
    reference = docs_module("reference")
    assert rows_of_methods()[name] == list(reference.needs_of(read_facts()[name])), UPDATE_HINT


@pytest.mark.parametrize(
    ("name", "column", "cell"),
    [
        # 10 classes x (192 sums in float32 + a count of 4 bytes) = 7,720 bytes
        ("fedncm", "MB up", "0.008"),
        ("fedncm", "rounds", "none"),
        ("fedncm", "classes may recur", "yes"),
        ("fedncm", "secure sums", "yes"),
        ("hgp", "venue", "arXiv"),
        ("hgp", "secure sums", "no"),  # its server merges the clients' Gaussians
        ("target", "synthetic data", "images"),
        ("mfcl", "synthetic data", "generator"),
        ("glfc", "synthetic data", "from gradients"),
        ("icarl", "exemplars", "kept"),
        ("joint", "exemplars", "all images"),
        ("local", "sent", "nothing"),
        ("fedcof", "secure sums", "no"),  # it reads the covariance of the clients' means
        ("pilora", "venue", "ECCV"),
    ],
)
def test_methods_page_cell_has_expected_value(
    name: str, column: str, cell: str, docs_module: Import
) -> None:
    assert rows_of_methods()[name][docs_module("reference").COLUMNS.index(column)] == cell


def test_generated_pages_are_current(docs_module: Import) -> None:
    texts = docs_module("reference").quick_pages()
    assert set(texts) == {"commands", "settings", "result"}
    for name, text in texts.items():
        assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == text, UPDATE_HINT


def commands_of(group: click.Group, path: str) -> dict[str, click.Command]:
    """Return all commands by their words, without groups."""
    commands: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        inner = f"{path} {name}"
        commands |= (
            commands_of(command, inner) if isinstance(command, click.Group) else {inner: command}
        )
    return commands


def test_every_option_has_one_heading() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    headings = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    option_names = {
        f"{path} {param.opts[0]}"
        for path, command in commands_of(main, "fczoo").items()
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
    }
    assert len(headings) == len(set(headings))
    assert set(headings) == option_names
    assert {"fczoo bench --dataset", "fczoo suite run --jobs"} <= option_names
