"""Figures as data: what is shown, whoever draws it — matplotlib for a paper, a page for a browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Colours = Literal["green", "blue", "orange", "purple", "blue to red", "purple to orange"]
"""Of a heat map: from nothing to a colour, or from one for negative values to another for positive ones."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What every kind of figure has."""

    name: str  # also of its file
    caption: str
    x: str  # what the axis shows, with its unit
    y: str
    of_methods: bool = True  # its labels are those of an experiment's lines


@dataclass(frozen=True, kw_only=True)
class Curves(Figure):
    """Curves over 1, 2, ...: of several runs their mean, with a band of one standard deviation."""

    curves: Mapping[str, np.ndarray]  # label -> [runs, x]; NaN where nothing was measured
    log: bool = False  # the values' axis
    marks: bool = True  # each value has a mark of its own


@dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """A point a run."""

    points: Mapping[str, np.ndarray]  # label -> [runs, 2], x before y
    front: Sequence[str] = ()  # labels that no other beats in x (less) and y (more) at once, by means
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
        """The number in a cell, without -0."""
        text = self.show.format(value)
        return text if float(text) else self.show.format(0)

    def share(self, value: float) -> float:
        """Where a value lies between the lowest, 0, and the highest, 1."""
        low = float(np.nanmin(self.values)) if self.low is None else self.low
        high = float(np.nanmax(self.values)) if self.high is None else self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A bar a label, made of parts."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)  # part -> its length in each bar


def counted(number: int, first: int = 1) -> list[str]:
    """Labels of rows and columns: ``1``, ``2``, ..."""
    return [str(first + i) for i in range(number)]
