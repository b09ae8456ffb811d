"""Print ``fczoo list methods``: every method by group, with what it trains and sends.

The facts come from a table, so that neither torch nor a method is imported.
"""

import csv
import itertools
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fczoo.core.registry import METHODS
from fczoo.reports.text_format import columns

# written by benchmarks/method_facts.py
TABLE = Path(str(files("fczoo") / "assets" / "methods.csv"))

GROUPS = {
    "methods": "Methods of Federated Class-Incremental Learning that fczoo compares.",
    "baselines": "Baselines without exemplars.",
    "exemplars": "Baselines that keep exemplars of old classes.",
    "analytic": "Analytic baselines, which train nothing and send statistics.",
    "bounds": "Upper bounds, which keep all old images.",
    "plug-ins": "Installed plug-ins.",
}
"""Group -> its heading, in the order of the list."""

NOTES = (
    "Sent: weights that are trained; counts, means, variances and second moments of classes.",
    "kB up: thousands of bytes that a client uploads in a round of the first task of digits.",
    "fczoo show METHOD has all about one method.",
)


HEAD = ("method", "year", "trained", "sent", "kB up", "what it is.")
BYTES = HEAD.index("kB up")  # aligned to the right
NARROW = {"trained": 16, "sent": 33}  # widths on a terminal of 80 columns
UNKNOWN = "?"
GAP = 2  # spaces between columns


class Facts(NamedTuple):
    """One row of the table."""

    method: str
    group: str
    year: str
    trained: str
    sent: str
    bytes: str


def list_methods() -> str:
    """Return all methods by group; on a narrow terminal without the sentence about each."""
    facts_by_method = read_facts()
    facts = [
        facts_by_method.get(name) or _facts_without_measurement(name) for name in METHODS.names()
    ]
    cells = {fact.method: _cells(fact) for fact in facts}
    widths = [max(map(len, column)) for column in zip(HEAD, *cells.values(), strict=True)]
    width = columns() or sum(widths) + GAP * len(widths)
    if sum(widths) + GAP * (len(widths) - 1) > width:
        widths = widths[:-1]  # without the sentence
    if sum(widths) + GAP * (len(widths) - 1) > width:
        widths = [
            min(width, NARROW.get(name, width)) for name, width in zip(HEAD, widths, strict=False)
        ]
    lines = _lines(HEAD, widths)
    for group, heading in GROUPS.items():
        rows = [line for f in facts if f.group == group for line in _lines(cells[f.method], widths)]
        lines += [heading, *rows] if rows else []
    if any(fact not in facts_by_method.values() for fact in facts):
        lines.append(f"{UNKNOWN}: not measured, as the method came later or from a plug-in.")
    notes = [textwrap.fill(note, max(width, 40)) for note in NOTES]
    return "\n".join([*lines, *notes])


def read_facts() -> dict[str, Facts]:
    """Return the rows of the table by method."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["method"]: Facts(**row) for row in csv.DictReader(file)}


def _facts_without_measurement(name: str) -> Facts:
    """Return the row of a method that the table does not have, such as a plug-in's."""
    places = {"methods": "fczoo.methods.", "baselines": "fczoo.baselines."}
    group = next((g for g, package in places.items() if name in METHODS.names(package)), "plug-ins")
    return Facts(name, group, "", UNKNOWN, UNKNOWN, "")


def _cells(fact: Facts) -> tuple[str, ...]:
    """Return the cells of a row: bytes in thousands, and the sentence about the method."""
    size = f"{int(fact.bytes) / 1000:,.1f}" if fact.bytes else UNKNOWN
    return (
        f"  {fact.method}",
        fact.year or "-",
        fact.trained,
        fact.sent,
        size,
        METHODS.about(fact.method),
    )


def _lines(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Return a row in columns; a cell wider than its column is continued below."""
    cell_widths = zip(cells, widths, strict=False)  # the last cell may be left out
    parts = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width) for cell, width in cell_widths
    ]
    lines = []
    for line in itertools.zip_longest(*parts, fillvalue=""):
        aligned_cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        aligned_cells[BYTES] = line[BYTES].rjust(widths[BYTES])
        lines.append((" " * GAP).join(aligned_cells).rstrip())
    return lines
