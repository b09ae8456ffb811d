"""Figures as data, drawn by matplotlib for a paper or by a page in a browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Colours = Literal["green", "blue", "orange", "purple", "blue to red", "purple to orange"]
"""Colours of a heat map: from nothing to one colour, or from a colour for negative values to
another for positive ones.
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Common fields of every kind of figure."""

    name: str  # also of its file
    caption: str
    x: str  # what the axis shows, with its unit
    y: str
    of_methods: bool = True  # its labels are those of an experiment's lines


@dataclass(frozen=True, kw_only=True)
class Curves(Figure):
    """Curves over 1, 2, ...: the mean of several runs, with a band of one standard deviation."""

    curves: Mapping[str, np.ndarray]  # label -> [runs, x]; NaN where nothing was measured
    positions: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # label -> [x], other than 1, 2, ...
    log: bool = False  # the values' axis
    marks: bool = True  # each value has its own mark
    ticks: Sequence[str] = ()  # names of 1, 2, ... on the axis of x
    background: Sequence[str] = ()  # labels of curves that a picture draws in grey, unnamed

    def x_of(self, label: str) -> np.ndarray:
        """Return the place of each value of a curve on the axis.

        Args:
            label: Label of the curve.
        """
        count = self.curves[label].shape[1]
        return self.positions.get(label, np.arange(1, count + 1))


@dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """One point per run."""

    points: Mapping[str, np.ndarray]  # label -> [runs, 2], x before y
    # labels that no other beats in x (less) and y (more) at once, by means
    front: Sequence[str] = ()
    log: bool = False  # the axis of x
    diagonal: bool = False  # with the line y = x


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """Coloured cells with their numbers, first row on top; NaN stays empty."""

    values: np.ndarray  # [rows, columns]
    rows: Sequence[str]
    columns: Sequence[str]
    colours: Colours
    show: str = "{:.0f}"
    low: float | None = None  # None: the least and the largest value
    high: float | None = None

    def cell(self, value: float) -> str:
        """Format the number in a cell, without -0.

        Args:
            value: Value of the cell.
        """
        text = self.show.format(value)
        return text if float(text) else self.show.format(0)

    def share(self, value: float) -> float:
        """Scale a value to 0 at the lowest and 1 at the highest.

        Args:
            value: Value of a cell.

        Returns:
            Number from 0 to 1; 0 where the lowest and the highest value are the same.
        """
        low = float(np.nanmin(self.values)) if self.low is None else self.low
        high = float(np.nanmax(self.values)) if self.high is None else self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """One bar per label, made of parts."""

    labels: Sequence[str]
    # part -> its length in each bar
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ImageGrid(Figure):
    """Images in rows and columns."""

    pixels: np.ndarray  # [rows, columns, height, width, 3] in [0, 1]
    rows: Sequence[str]
    columns: Sequence[str]


def number_labels(number: int, first: int = 1) -> list[str]:
    """Label rows or columns with numbers: ``1``, ``2``, ...

    Args:
        number: Number of labels.
        first: First of them.
    """
    return [str(first + i) for i in range(number)]
