"""The pages in results/ say what results.csv holds: each number of their tables is computed again."""

import re
from pathlib import Path

import pytest

from fczoo.reports.columns import COLUMNS
from fczoo.reports.formats import number
from fczoo.reports.runs import Line, experiments_of, read_runs
from fczoo.reports.tables import entry_of

RESULTS = Path(__file__).parents[2] / "results"
PAGES = sorted(RESULTS.glob("tables/*.md"))


@pytest.fixture(scope="module")
def archive():
    return read_runs([RESULTS / "results.csv"])


def rows(page: Path) -> list[dict[str, str]]:
    """The rows of all tables of methods in a page, by the names of their columns."""
    found: list[dict[str, str]] = []
    for table in re.findall(r"(?m)(?:^\|.*\n)+", page.read_text(encoding="utf-8")):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        head, _, *lines = cells
        if head[0] == "method":
            found += [dict(zip(head, line, strict=True)) for line in lines]
    return found


def agrees(row: dict[str, str], line: Line) -> bool:
    """Whether a row says of one line of the archive what the reports say of it."""
    seeds = int(row.get("seeds", len(line.seeds)))
    return (
        re.split("[, ]", row["method"])[0] == line.results[0].method
        and seeds == len(line.seeds)
        and int(row.get("trials", line.cells[-1].trials)) == line.cells[-1].trials
        and all(
            said == number(entry_of(line, COLUMNS[name]), COLUMNS[name])
            for name, said in row.items()
            if name in COLUMNS
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_row_of_a_page_is_one_of_the_archive(page, archive):
    """The page's name is that of the folders from which its rows were made."""
    runs = [r for r in archive if r.name.split("/")[0] == page.stem]
    (experiment, *_) = experiments_of(runs, page.stem)
    said = rows(page)
    assert len(said) >= 5
    missing = [row for row in said if not any(agrees(row, line) for line in experiment.lines)]
    assert not missing


def test_the_first_page_names_all_others():
    named = re.findall(r"\]\((\S+?\.md)\)", (RESULTS / "README.md").read_text(encoding="utf-8"))
    assert {RESULTS / name for name in named} == {*PAGES, RESULTS / "older.md"}
