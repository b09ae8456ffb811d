"""Agreement of results/README.md with the pages of suites and with commands."""

import re

from fczoo.papers.claims import listing
from helpers_results import RESULTS

FIRST_PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")


def test_first_page_links_all_pages():
    links = re.findall(r"\]\((\S+?\.md)\)", FIRST_PAGE)
    assert {RESULTS / name for name in links} == {*RESULTS.glob("*.md")} - {RESULTS / "README.md"}


def test_first_page_names_all_archives():
    named = {*re.findall(r"`([a-z0-9]+\.csv)`", FIRST_PAGE)}
    assert named == {path.name for path in RESULTS.glob("*.csv")}


def test_conclusion_numbers_are_on_linked_page():
    """Find every decimal number of an item on the first page that the item links to."""
    conclusions = FIRST_PAGE.split("\n## What may be concluded")[1]
    items = [" ".join(item.split()) for item in re.split(r"\n- ", conclusions)[1:]]
    assert len(items) > 3
    for item in items:
        numbers = re.findall(r"(?<![\d.])-?\d+\.\d+", item)
        pages = re.findall(r"\]\((\w+\.md)\)", item)
        assert pages or not numbers, item
        if pages:
            page = (RESULTS / pages[0]).read_text(encoding="utf-8")
            on_page = {*re.findall(r"(?<![\d.])-?\d+\.\d+", page)}
            assert {*numbers} <= on_page, item


def test_first_page_claim_counts_match_command():
    page = " ".join(FIRST_PAGE.split())
    sentence = re.search(r"Of (\d+) claims of the papers (\d+) hold .*?\(`fczoo claims", page)[0]
    line = re.search(r"Where both sides were tuned: (.*)", listing(RESULTS))[1]
    assert re.findall(r"\d+", sentence) == re.findall(r"\d+", line)
