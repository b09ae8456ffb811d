"""Tables of text: sentences are wrapped; on a narrow terminal other columns are, too."""

from unittest import mock

import pytest

from fczoo.reports import text_format
from fczoo.reports.text_format import word_table

HEAD = ["claim", "here", "what it says"]
ROWS = [
    (
        "pilora-reweight-quantity",
        "does not hold 3x, not significantly different",
        "Re-weighting helps " * 6,
    ),
    ("hgp-l2p", "holds", "HGP beats L2P"),
]


def table(width: int | None) -> list[str]:
    with mock.patch.object(text_format, "columns", return_value=width):
        return word_table(ROWS, HEAD).splitlines()


def test_file_output_wraps_only_sentences():
    lines = table(None)
    assert len(lines) == 2 + 2 + 1  # 113 characters in two lines of 80
    assert lines[2].startswith(
        "pilora-reweight-quantity  does not hold 3x, not significantly different  Re-weighting"
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_table_fits_terminal_width(width):
    lines = table(width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(line.split()) for line in lines[2:])
    assert "pilora-reweight-quantity" in text and text.count("weighting") == 6


def test_sentence_column_is_twice_as_wide():
    first, second, third = map(len, table(80)[1].split())
    assert first == len("pilora-reweight-quantity")  # a name is never broken
    assert second == 17
    assert 30 <= third <= 35  # 80 - 24 - 2 * 2 = 52 for two columns; lines may end before 35


def test_narrow_terminal_breaks_no_word():
    assert any("Re-weighting" in line for line in table(10))


@pytest.mark.parametrize("width", [None, 30])
def test_numbers_are_not_changed(width):
    with mock.patch.object(text_format, "columns", return_value=width):
        assert "5,130" in word_table(
            [("hgp", "5,130", "scalars that are trained")], ["method", "n", "what"]
        )
