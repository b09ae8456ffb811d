"""CSV whose cells a spreadsheet shows but does not run."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def to_csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV text, with an apostrophe before text that looks like a formula."""
    return "".join(_line(row) for row in rows)


def _line(row: Sequence[Any]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow([quote_formula(cell) for cell in row])
    return out.getvalue().removesuffix("\r\n") + "\n"  # csv leaves \r bare where it ends no line


def quote_formula(cell: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would run as a formula."""
    if not isinstance(cell, str) or not FORMULA.match(cell) or _is_number(cell):
        return cell
    return f"'{cell}"


def unquote_formula(cell: str) -> str:
    """Return what ``quote_formula`` was given."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text[0].isspace()
