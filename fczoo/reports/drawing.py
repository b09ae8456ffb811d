"""What all figures share: colours, style, legends, heat maps, files."""

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.reports.runs import Experiment, Line

COLOURS = (
    "#3b7dd8",
    "#e07b39",
    "#2f9e6e",
    "#c44e8a",
    "#8a6fd1",
    "#b0891f",
    "#1f9fb5",
    "#d1495b",
    "#6b7f2a",
    "#8d6748",
)
INK = "#7f7f80"  # a colour that nothing else has: in a page it becomes the colour of the text
STYLE = {
    "text.parse_math": False,  # names come from folders and may hold any sign
    "font.size": 9,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def pyplot() -> Any:
    """matplotlib without a display. Raises FczooError when it is not installed."""
    try:
        from matplotlib import pyplot, use
    except ImportError as error:
        raise FczooError("plots need matplotlib; pip install 'fczoo[plot]'") from error
    use("agg")
    return pyplot


def to_svg(figure: Any, name: str) -> str:
    """Inline SVG that takes the page's text colour and names nothing outside itself."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    pyplot().close(figure)
    svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), count=1, flags=re.DOTALL)
    # text as large in a small figure as in a wide one
    width = f'style="max-width: {100 * figure.get_figwidth():.0f}px"'
    svg = re.sub(
        r'(<svg[^>]*?) height="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) width="[^"]*"', rf"\1 {width}", svg, count=1),
        count=1,
    )
    return svg.replace(INK, "currentColor")


def ink_of_style() -> str:
    return str(pyplot().rcParams["text.color"])


def coloured(experiment: Experiment) -> Iterator[tuple[Line, str, int]]:
    """Each line with a colour, and how often that colour was taken before, for another stroke or mark."""
    for i, line in enumerate(experiment.lines):
        yield line, COLOURS[i % len(COLOURS)], i // len(COLOURS) % 3


def band(
    axes: Any, x: np.ndarray, curves: np.ndarray, label: str, colour: str, turn: int, marker: str = "o"
) -> None:
    mean = curves.mean(0)
    axes.plot(
        x,
        mean,
        label=label,
        color=colour,
        marker=marker,
        markersize=3.5,
        linewidth=1.6,
        linestyle=("-", "--", ":")[turn],
    )
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def heat(
    axes: Any,
    values: np.ndarray,
    show: str,
    colours: str,
    low: float | None = None,
    high: float | None = None,
) -> None:
    """Coloured cells with their numbers, first row on top; NaN stays empty."""
    mesh = axes.pcolormesh(np.ma.masked_invalid(values), cmap=colours, vmin=low, vmax=high)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = sum(mesh.cmap(mesh.norm(value))[:3]) < 1.6
            text = re.sub(r"^-(0\.?0*)$", r"\1", show.format(value))  # no -0
            axes.text(
                column + 0.5,
                row + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if dark else "black",
            )
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def legend(figure: Any, axes: Any) -> Any:
    """The figure with a legend below it if it needs one; a long one makes the figure higher."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = max(1, min(4, 80 // (max(map(len, labels)) + 6)))  # about 80 characters fit
        figure.set_figheight(figure.get_figheight() + 0.18 * max(0, len(labels) / columns - 4))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure
