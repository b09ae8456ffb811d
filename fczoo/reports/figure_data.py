"""Figures as data, which matplotlib draws for papers and the leaderboard draws in a browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Colours = Literal["green", "blue", "orange", "purple", "blue to red", "purple to orange"]
"""Colour scale of a heat map: from white to one colour, or between two colours around white."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Common fields of every kind of figure."""

    name: str  # also the name of its file
    caption: str
    x: str  # label of the axis, with its unit
    y: str
    of_methods: bool = True  # whether its labels are those of an experiment's lines


@dataclass(frozen=True, kw_only=True)
class Curves(Figure):
    """Curves over 1, 2, ...: the mean of several runs, with a band of one standard deviation."""

    curves: Mapping[str, np.ndarray]  # values [runs, x] by label; NaN: not measured
    # positions [x] by label, if they are not 1, 2, ...
    positions: Mapping[str, np.ndarray] = field(default_factory=dict)
    log: bool = False  # logarithmic y axis
    marks: bool = True  # draw a marker at each value
    ticks: Sequence[str] = ()  # labels of 1, 2, ... on the x axis
    background: Sequence[str] = ()  # labels of curves that are drawn in grey, without names
    controls: Sequence[str] = ()  # labels of curves that are drawn in black, above the others

    def x_of(self, label: str) -> np.ndarray:
        """Return the position of each value of a curve on the x axis.

        Args:
            label: Label of the curve.
        """
        count = self.curves[label].shape[1]
        return self.positions.get(label, np.arange(1, count + 1))


@dataclass(frozen=True, kw_only=True)
class Points(Figure):
    """One point per run."""

    points: Mapping[str, np.ndarray]  # points [runs, 2], x and y, by label
    # labels on the Pareto front of their means: low x, high y
    front: Sequence[str] = ()
    log: bool = False  # logarithmic x axis
    diagonal: bool = False  # draw the line y = x


@dataclass(frozen=True, kw_only=True)
class HeatMap(Figure):
    """Heat map: coloured cells with their numbers, first row on top; cells of NaN are empty."""

    values: np.ndarray  # [rows, columns]
    rows: Sequence[str]
    columns: Sequence[str]
    colours: Colours
    show: str = "{:.0f}"  # format of the numbers
    low: float | None = None  # None: the smallest value
    high: float | None = None  # None: the largest value

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
            Number from 0 to 1; 0 if the lowest and the highest value are equal.
        """
        low = float(np.nanmin(self.values)) if self.low is None else self.low
        high = float(np.nanmax(self.values)) if self.high is None else self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """One stacked bar per label."""

    labels: Sequence[str]
    # lengths of a part in each bar, by part
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
        first: First number.
    """
    return [str(first + i) for i in range(number)]
