"""Axes and colours of figures that matplotlib draws."""

import numpy as np
import pytest

from fczoo.reports.drawing import draw
from fczoo.reports.figure_data import Curves, Points

pytest.importorskip("matplotlib")


def test_flat_curve_has_margin_above():
    """Start the y axis at 0 and add a margin of 5 % of the highest point, 16."""
    figure = Curves(
        name="a", caption="", x="x", y="y", curves={"m": np.array([[15.0, 15.0, 16.0]])}
    )
    assert draw(figure).axes[0].get_ylim() == pytest.approx((0, 16.8))


@pytest.mark.parametrize(("lowest", "bottom"), [(60.0, 58.0), (50.0, 0.0), (80.0, 0.0)])
def test_axis_starts_above_zero_only_for_high_values_that_differ(lowest, bottom):
    """Start at 0 if values reach the lower half, or differ by a fifth of the highest or less."""
    curves = {"m": np.array([[100.0, lowest]])}
    figure = Curves(name="a", caption="", x="x", y="y", curves=curves)
    assert draw(figure).axes[0].get_ylim()[0] == pytest.approx(bottom)  # margin 5 % of 40


def test_axis_includes_negative_values():
    """Show points on both sides of 0, as maps of features and forgetting have them."""
    values = np.array([[0.0, -10.0], [1.0, 10.0]])
    points = Points(name="a", caption="", x="x", y="y", points={"m": values})
    curves = Curves(name="a", caption="", x="x", y="y", curves={"m": values[:, 1:].T})
    for figure in (points, curves):
        assert draw(figure).axes[0].get_ylim() == pytest.approx((-11, 11))


@pytest.mark.parametrize("count", [0, 9])
def test_any_number_of_controls_is_drawn(count):
    """Draw controls in black, also if there are more than strokes, and a figure without curves."""
    curves = {f"control {i}": np.full((1, 3), float(i)) for i in range(count)}
    figure = Curves(name="a", caption="", x="x", y="y", curves=curves, controls=list(curves))
    assert [line.get_color() for line in draw(figure).axes[0].lines] == ["black"] * count
