"""Test CSV text that spreadsheets do not execute as formulas."""

import csv
import io

import pytest

from fczoo.core.files import quote_formula, to_csv_text, unquote_formula

FORMULAS = ["=1+1", "+x", "-x", "@SUM(A1)", "\tb", "\rc", "\nd", "＝1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_formula_gets_apostrophe(text):
    assert quote_formula(text) == f"'{text}"


@pytest.mark.parametrize("cell", ["-3.5", "+1e5", "-2", -2, 1.5, None, "", "cat", "a=b", "don't"])
def test_numbers_and_plain_text_are_unchanged(cell):
    assert quote_formula(cell) is cell


def test_quoted_cells_are_read_back():
    row = [*FORMULAS, "'=q", "''=q", "-3.5", "plain, with a comma", 'a "quote"', "two\r\nlines"]
    text = to_csv_text([row])
    assert text.startswith("'=1+1,'+x,'-x,'@SUM(A1),")
    cells = next(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert [unquote_formula(cell) for cell in cells] == row
