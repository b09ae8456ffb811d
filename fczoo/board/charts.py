"""Template data of charts, and data URLs of CSV files."""

import base64
import math
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np

from fczoo.core.files import to_csv_text
from fczoo.reports.figure_data import Bars, Curves, Figure, HeatMap, Points

DIGITS = 6  # significant digits of numbers in a chart


@singledispatch
def chart(figure: Figure) -> dict[str, Any]:
    """Convert a figure to template data.

    Args:
        figure: Figure of a registered kind: curves, points, heat or bars.

    Returns:
        Values by template name.

    Raises:
        TypeError: The kind of figure is not registered.
    """
    raise TypeError(
        f"cannot show a {type(figure).__name__} on a page: it is not a known kind of figure"
    )


def _common(figure: Figure, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": figure.name,
        "caption": figure.caption,
        "x": figure.x,
        "y": figure.y,
        "of_methods": figure.of_methods,
    }


@chart.register
def _curves(figure: Curves) -> dict[str, Any]:
    series = []
    for label, values in figure.curves.items():
        mean = values.mean(0)
        std = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
        series.append(
            {
                "label": label,
                "runs": len(values),
                "points": [
                    *map(list, zip(_numbers(figure.x_of(label)), _numbers(mean), strict=True))
                ],
                "spread": _numbers(std),
            }
        )
    return {**_common(figure, "curves"), "log": figure.log, "marks": figure.marks, "series": series}


@chart.register
def _points(figure: Points) -> dict[str, Any]:
    series = [
        {"label": label, "runs": len(values), "points": [_numbers(point) for point in values]}
        for label, values in figure.points.items()
        if len(values)
    ]
    front = [_numbers(figure.points[label].mean(0)) for label in figure.front]
    details = {"log": figure.log, "diagonal": figure.diagonal, "front": front, "series": series}
    return {**_common(figure, "points"), **details}


@chart.register
def _heat(figure: HeatMap) -> dict[str, Any]:
    two_sided = " to " in figure.colours
    colours = figure.colours.split(" to ")

    def cell(value: float) -> dict[str, Any] | None:
        if not math.isfinite(value):
            return None
        share = figure.share(value)
        if two_sided:  # scales of two colours start in the middle
            return {
                "text": figure.cell(value),
                "percent": round(200 * abs(share - 0.5)),
                "colour": colours[share > 0.5],
            }
        return {"text": figure.cell(value), "percent": round(100 * share), "colour": colours[0]}

    rows = [
        (label, [cell(value) for value in row])
        for label, row in zip(figure.rows, figure.values.tolist(), strict=True)
    ]
    return {**_common(figure, "heat"), "columns": figure.columns, "rows": rows}


@chart.register
def _bars(figure: Bars) -> dict[str, Any]:
    totals = [
        sum(lengths[i] for lengths in figure.parts.values()) for i in range(len(figure.labels))
    ]
    longest = max(totals) or 1.0
    rows = [
        (
            label,
            [
                (part, lengths[i], 100 * lengths[i] / longest)
                for part, lengths in figure.parts.items()
            ],
            total,
        )
        for i, (label, total) in enumerate(zip(figure.labels, totals, strict=True))
    ]
    return {**_common(figure, "bars"), "parts": list(figure.parts), "rows": rows}


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Round numbers for JSON; NaN and infinity become None."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in values]


def download(text: str) -> str:
    """Return a data URL that contains a CSV file."""
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a data URL of a CSV file with these rows.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
    """
    return download(to_csv_text([head, *rows]))
