"""The pages in results/, and which line of the archive a row of theirs is."""

import re
from functools import cache
from pathlib import Path

from fczoo.reports.columns import COLUMNS
from fczoo.reports.formats import number
from fczoo.reports.runs import Line, Runs, experiments_of, read_runs
from fczoo.reports.tables import entry_of

RESULTS = Path(__file__).parents[1] / "results"
PAGES = sorted(RESULTS.glob("tables/*.md"))


def rows(page: Path) -> list[dict[str, str]]:
    """The rows of all tables of methods in a page, by the names of their columns."""
    found: list[dict[str, str]] = []
    for table in re.findall(r"(?m)(?:^\|.*\n)+", page.read_text(encoding="utf-8")):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        head, _, *lines = cells
        if head[0] == "method":
            found += [dict(zip(head, line, strict=True)) for line in lines]
    return found


@cache
def archive() -> list[Runs]:
    return read_runs([RESULTS / "results.csv"])


@cache
def lines_of(page: str) -> tuple[Line, ...]:
    """The lines behind a page, whose name is that of the folders from which its rows were made."""
    runs = [r for r in archive() if r.name.split("/")[0] == page]
    (experiment, *_) = experiments_of(runs, page)
    return experiment.lines


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
