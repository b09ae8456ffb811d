"""All p values on the pages in results/ are computed again.

``said_p_values.txt`` has their rows.
"""

import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from fczoo.reports.runs import Line
from fczoo.reports.significance import p_value
from fczoo.reports.tables import COLUMNS, entry_of
from helpers_pages import PAGES, RESULTS, agrees, lines_of, rows

SHORT = {
    "TUNED": "cifar100-112px-tuned",
    "SEARCHED": "cifar100-112px-epochs-searched",
    "TWO": "cifar100-112px-quantity-tuned",
    "TINY": "tinyimagenet-112px-tuned",
    "SKEW": "cifar100-112px-skew-tuned",
}
NO_ROWS = "not in the archive"
NUMBERS = r"[\d.]+(?:(?:, | and | to )[\d.]+)*"


def read_p_values() -> list[tuple[str, str, list[str]]]:
    """Return page, phrase that ends with its p values, and the pairs of rows that it compares."""
    page, entries = "", list[tuple[str, str, list[str]]]()
    for line in (
        Path(__file__).with_name("said_p_values.txt").read_text(encoding="utf-8").splitlines()
    ):
        if line.startswith("== "):
            page = SHORT.get(line[3:], line[3:])
        elif line.startswith("  "):
            entries[-1][2].append(line.strip())
        elif line and not line.startswith("#"):
            entries.append((page, line, []))
    return entries


P_VALUES = read_p_values()


@cache
def text(page: str) -> str:
    """Return a page with its lines joined."""
    path = RESULTS / "README.md" if page == "README" else RESULTS / "tables" / f"{page}.md"
    return " ".join(path.read_text(encoding="utf-8").split())


def find(page: str, wanted: str) -> Line:
    """Return the archive's line for a page's row of that name.

    With options, its label has these.
    """
    row_page, _, name = wanted.rpartition("/")
    page = SHORT.get(row_page, row_page or page)
    method, _, options = name.partition(":")
    if options:
        matches = [
            line
            for line in lines_of(page)
            if line.results[0].method == method
            and all(part in line.label for part in options.split(";"))
        ]
    else:
        said_there = rows(RESULTS / "tables" / f"{page}.md")
        rows_by_name = {r["method"].split(",")[0]: r for r in said_there} | {
            r["method"]: r for r in said_there
        }
        row = rows_by_name[name]
        matches = [line for line in lines_of(page) if agrees(row, line)]
    assert len(matches) == 1, (wanted, [line.label for line in matches])
    return matches[0]


@pytest.mark.parametrize(
    ("page", "phrase", "pairs"), P_VALUES, ids=[f"{p}-{s}" for p, s, _ in P_VALUES]
)
def test_each_p_value_is_that_of_its_rows(page, phrase, pairs):
    assert text(page).count(phrase) == 1
    numbers = re.search(rf"p ({NUMBERS})$", phrase)[1]
    if pairs == [NO_ROWS]:
        return
    p_values = []
    for pair in pairs:
        first_names, right = (side.split() for side in pair.split(" | "))
        for first in first_names:
            for second in right:
                entries = [entry_of(find(page, name), COLUMNS["A_N"]) for name in (first, second)]
                p_values.append(p_value(*entries))
    if " to " in numbers:
        p_values = [min(p_values), max(p_values)]
    on_page = re.findall(r"[\d.]+", numbers)
    on_page = on_page * len(p_values) if len(on_page) == 1 else on_page
    digits = [-Decimal(e).as_tuple().exponent for e in on_page]
    our_digits = [f"{p:.{places}f}" for p, places in zip(p_values, digits, strict=True)]
    assert our_digits == on_page


@pytest.mark.parametrize("page", ["README", *(page.stem for page in PAGES)])
def test_no_other_p_value_is_said(page):
    remainder = text(page)
    for _, phrase, _ in sorted((s for s in P_VALUES if s[0] == page), key=lambda s: -len(s[1])):
        remainder = remainder.replace(phrase, "")
    assert not re.findall(rf".{{60}}\bp {NUMBERS}", remainder)
