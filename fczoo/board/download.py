"""Files that a page holds itself, to be downloaded."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from fczoo.core.csv_text import to_csv_text


def download(text: str) -> str:
    """An address that holds a CSV file itself."""
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The address of a CSV file with these rows."""
    return download(to_csv_text([head, *rows]))
