"""Test the page of readings: its files exist, and method pages show the rows of their method."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fczoo.core.registry import METHODS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "readings.md").read_text(encoding="utf-8")
Import = Callable[[str], ModuleType]


def test_headings_name_methods_in_alphabetical_order() -> None:
    headings = re.findall(r"^### (.*)$", TEXT, flags=re.MULTILINE)
    assert all(METHODS.find(name) for heading in headings for name in heading.split(", "))
    assert headings == sorted(headings, key=lambda name: name.replace("-", "").casefold())


def test_files_of_readings_exist() -> None:
    files = re.findall(r" \| ([\w/]+\.py) \|$", TEXT, flags=re.MULTILINE)
    assert len(files) > 100
    assert not [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("bic", ["corrections of all tasks"]),
        ("afc", ["PODNet, AFC: each", "PODNet, AFC: new", "importance summed"]),
        ("stsa", ["RanPAC, STSA: dropout"]),  # the other row of its table is about STSA-E
        ("stsae", ["STSA-E: a client"]),
        ("joint", []),
    ],
)
def test_method_page_shows_rows_of_its_method(
    name: str, starts: list[str], docs_module: Import
) -> None:
    rows = docs_module("pages")._readings(name)
    assert len(rows) == len(starts)
    assert all(row[0].startswith(start) for row, start in zip(rows, starts, strict=True))
