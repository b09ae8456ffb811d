"""The pages in results/ agree with results.csv: each number of their tables is computed again."""

import re

import pytest

from fczoo.papers.claims import listing
from helpers_pages import PAGES, RESULTS, agrees, lines_of, rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_row_of_a_page_is_one_of_the_archive(page):
    page_rows = rows(page)
    assert len(page_rows) >= 5
    missing = [
        row for row in page_rows if not any(agrees(row, line) for line in lines_of(page.stem))
    ]
    assert not missing


def test_the_first_page_names_all_others():
    links = re.findall(r"\]\((\S+?\.md)\)", (RESULTS / "README.md").read_text(encoding="utf-8"))
    others = {*PAGES, *RESULTS.glob("*.md")} - {RESULTS / "README.md"}
    assert {RESULTS / name for name in links} == others


def test_the_first_page_counts_claims_as_the_command_does():
    page = " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())
    sentence = re.search(r"Of (\d+) claims of the papers (\d+) hold .*?\(`fczoo claims", page)[0]
    command_line = re.search(
        r"Where both sides were tuned: (.*)", listing(RESULTS / "results.csv")
    )[1]
    assert re.findall(r"\d+", sentence) == re.findall(r"\d+", command_line)
