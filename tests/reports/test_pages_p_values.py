"""Each p value that the pages in results/ say is computed again: ``said_p_values.txt`` has its rows."""

import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from fczoo.reports.columns import COLUMNS
from fczoo.reports.runs import Line
from fczoo.reports.tables import entry_of, p_value
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


def said() -> list[tuple[str, str, list[str]]]:
    """Page, phrase that ends with its p values, and the pairs of rows it is about."""
    page, found = "", list[tuple[str, str, list[str]]]()
    for line in Path(__file__).with_name("said_p_values.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            page = SHORT.get(line[3:], line[3:])
        elif line.startswith("  "):
            found[-1][2].append(line.strip())
        elif line and not line.startswith("#"):
            found.append((page, line, []))
    return found


SAID = said()


@cache
def text(page: str) -> str:
    """Of a page, its lines joined."""
    path = RESULTS / "README.md" if page == "README" else RESULTS / "tables" / f"{page}.md"
    return " ".join(path.read_text(encoding="utf-8").split())


def find(page: str, wanted: str) -> Line:
    """The line of the archive that is a page's row of that name, or whose label has the options after it."""
    place, _, name = wanted.rpartition("/")
    page = SHORT.get(place, place or page)
    method, _, options = name.partition(":")
    if options:
        known = [
            line
            for line in lines_of(page)
            if line.results[0].method == method and all(part in line.label for part in options.split(";"))
        ]
    else:
        said_there = rows(RESULTS / "tables" / f"{page}.md")
        named = {r["method"].split(",")[0]: r for r in said_there} | {r["method"]: r for r in said_there}
        row = named[name]
        known = [line for line in lines_of(page) if agrees(row, line)]
    assert len(known) == 1, (wanted, [line.label for line in known])
    return known[0]


@pytest.mark.parametrize(("page", "phrase", "pairs"), SAID, ids=[f"{p}-{s}" for p, s, _ in SAID])
def test_each_p_value_is_that_of_its_rows(page, phrase, pairs):
    assert text(page).count(phrase) == 1
    numbers = re.search(rf"p ({NUMBERS})$", phrase)[1]
    if pairs == [NO_ROWS]:
        return
    computed = []
    for pair in pairs:
        left, right = (side.split() for side in pair.split(" | "))
        for first in left:
            for second in right:
                entries = [entry_of(find(page, name), COLUMNS["A_N"]) for name in (first, second)]
                computed.append(p_value(*entries))
    if " to " in numbers:
        computed = [min(computed), max(computed)]
    expected = re.findall(r"[\d.]+", numbers)
    expected = expected * len(computed) if len(expected) == 1 else expected
    digits = [-Decimal(e).as_tuple().exponent for e in expected]
    rounded = [f"{p:.{places}f}" for p, places in zip(computed, digits, strict=True)]
    assert rounded == expected


@pytest.mark.parametrize("page", ["README", *(page.stem for page in PAGES)])
def test_no_other_p_value_is_said(page):
    rest = text(page)
    for _, phrase, _ in sorted((s for s in SAID if s[0] == page), key=lambda s: -len(s[1])):
        rest = rest.replace(phrase, "")
    assert not re.findall(rf".{{60}}\bp {NUMBERS}", rest)
