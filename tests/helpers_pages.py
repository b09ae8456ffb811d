"""The pages in results/, and the line of the archive that each of their rows is."""

import re
from functools import cache
from pathlib import Path

from fczoo.reports.formats import number
from fczoo.reports.runs import Line, Runs, experiments_of, read_runs
from fczoo.reports.tables import COLUMNS, entry_of

RESULTS = Path(__file__).parents[1] / "results"
PAGES = sorted(RESULTS.glob("tables/*.md"))


def rows(page: Path) -> list[dict[str, str]]:
    """Return the rows of all tables of methods in a page, by the names of their columns."""
    records: list[dict[str, str]] = []
    for table in re.findall(r"(?m)(?:^\|.*\n)+", page.read_text(encoding="utf-8")):
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        head, _, *lines = cells
        if head[0] == "method":
            records += [dict(zip(head, line, strict=True)) for line in lines]
    return records


@cache
def archive() -> list[Runs]:
    return read_runs([RESULTS / "results.csv"])


@cache
def lines_of(page: str) -> tuple[Line, ...]:
    """Return the lines behind a page.

    The page has the name of the folders from which its rows were made.
    """
    runs = [r for r in archive() if r.name.split("/")[0] == page]
    (experiment, *_) = experiments_of(runs, page)
    return experiment.lines


def agrees(row: dict[str, str], line: Line) -> bool:
    """Check that a row has the figures that the reports give for one line of the archive."""
    seeds = int(row.get("seeds", len(line.seeds)))
    return (
        re.split("[, ]", row["method"])[0] == line.results[0].method
        and seeds == len(line.seeds)
        and int(row.get("trials", line.records[-1].trials)) == line.records[-1].trials
        and all(
            text == number(entry_of(line, COLUMNS[name]), COLUMNS[name])
            for name, text in row.items()
            if name in COLUMNS
        )
    )
