"""Drawing of figures with matplotlib (extra ``plot``), for papers, slides and notebooks."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.reports.figure_data import Bars, Curves, Figure, HeatMap, ImageGrid, Points
from fczoo.reports.figures import colour_order, figures
from fczoo.reports.runs import Experiment, read_experiments

# Okabe and Ito's colour-blind palette, darkened for thin lines; same as --c0 to --c5 of the page
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b3478c", "#8a6d00", "#6a5acd")
STROKES = (
    "-",
    "--",
    ":",
    "-.",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (1, 3)),
    (0, (8, 3)),
    (0, (8, 2, 2, 2)),
)
MARKERS = "o^sDvXP*"
MAX_TICKS = 12  # largest number of tasks or rounds that all have a tick
MIN_LABEL_SHARE = 0.08  # smallest share of a bar that has a label
MAPS = {
    "green": "Greens",
    "blue": "Blues",
    "orange": "Oranges",
    "purple": "Purples",
    "blue to red": "RdBu_r",
    "purple to orange": "PuOr_r",
}
WITHOUT_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""Metadata by suffix that omit the date, so that equal figures give equal files."""
STYLE: Any = {
    "text.parse_math": False,  # names come from folders and may contain any character
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def import_matplotlib() -> Any:
    """Import and return matplotlib.

    Raises:
        FczooError: The package is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise FczooError("figures need matplotlib; run pip install 'fczoo[plot]'") from error
    return matplotlib


def picture_class() -> Any:
    """Return a subclass of matplotlib's figure that notebooks display without pyplot.

    Raises:
        FczooError: matplotlib is not installed.
    """
    import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    class Picture(MatplotlibFigure):
        """Figure without a window, which notebooks display as PNG."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=110)
            return out.getvalue()

    return Picture


def write_all_figures(
    places: Sequence[Path], folder: Path, extra_figures: Sequence[Sequence[Figure]] = ()
) -> None:
    """Write the figures of all experiments; several experiments get numbered folders.

    Args:
        places: Run folders, archives, or folders that contain them.
        folder: Folder of the figures; it is created if needed.
        extra_figures: Further figures of each experiment, in the order of ``read_experiments``.

    Raises:
        FczooError: No run is finished, or matplotlib is not installed.
    """
    experiments = read_experiments(places)
    order = colour_order(experiments)
    for i, experiment in enumerate(experiments):
        place = folder / f"{i + 1}" if len(experiments) > 1 else folder
        write_figures(experiment, place, order, extra_figures[i] if extra_figures else ())


def write_figures(
    experiment: Experiment,
    folder: Path,
    order: Mapping[str, int] | None = None,
    extra_figures: Sequence[Figure] = (),
) -> list[Path]:
    """Write every figure of an experiment as PNG and PDF.

    Args:
        experiment: Experiment to draw.
        folder: Folder of the figures; it is created if needed.
        order: Colour number by row label, for a whole report; None: for this experiment.
        extra_figures: Further figures.

    Returns:
        Files that were written.

    Raises:
        FczooError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = colour_order([experiment]) if order is None else order
    return save_figures((*figures(experiment), *extra_figures), folder, order)


def save_figures(
    figure_list: Sequence[Figure], folder: Path, order: Mapping[str, int] | None = None
) -> list[Path]:
    """Write figures as PNG and PDF, with file names from their names.

    Args:
        figure_list: Figures to draw.
        folder: Existing folder.
        order: Colour number by row label; None: rows are numbered in their order.

    Returns:
        Files that were written.

    Raises:
        FczooError: matplotlib is not installed.
    """
    paths = []
    for figure in figure_list:
        stem = re.sub(r"[^\w=.-]+", "-", figure.name).strip("-")
        picture = draw(figure, order)
        for suffix in ("png", "pdf"):
            paths.append(folder / f"{stem}.{suffix}")
            picture.savefig(paths[-1], dpi=160, metadata=WITHOUT_DATE.get(f".{suffix}"))
    return paths


def draw(figure: Figure, order: Mapping[str, int] | None = None) -> Any:
    """Draw a figure with matplotlib.

    Args:
        figure: Figure to draw.
        order: Colour number by row label; None: rows are numbered in their order.

    Returns:
        Figure of matplotlib.

    Raises:
        FczooError: matplotlib is not installed.
    """
    with import_matplotlib().rc_context(STYLE):
        return _draw(figure, order if order and figure.of_methods else {})


def _new_picture(figsize: tuple[float, float]) -> Any:
    picture = picture_class()(figsize=figsize)
    return picture, picture.subplots()


def _start_at_zero(axes: Any) -> None:
    """Start the y axis at 0 if no value is negative, with a margin above the values.

    Values far above 0 keep their own limits if they differ by more than a fifth of the highest.
    """
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low < 0 or 0.5 * high < low < 0.8 * high:
        return
    axes.update_datalim([(axes.dataLim.x0, 0.0)])
    axes.autoscale_view()
    axes.set_ylim(bottom=0)


@singledispatch
def _draw(figure: Figure, order: Mapping[str, int]) -> Any:
    raise TypeError(f"cannot draw a {type(figure).__name__}: it is not a known kind of figure")


@_draw.register
def _curves(figure: Curves, order: Mapping[str, int]) -> Any:
    picture, axes = _new_picture((5.2, 3.4))
    foreground = {k: v for k, v in figure.curves.items() if k not in figure.background}
    for label, values, colour, style in _with_colours(foreground, order, figure.controls):
        x, mean = figure.x_of(label), values.mean(0)
        marks = {"marker": MARKERS[style], "markersize": 3.5} if figure.marks else {}
        strokes = {"linewidth": 1.6, "linestyle": STROKES[style]}
        z_order = {"zorder": 2.5} if label in figure.controls else {}
        axes.plot(x, mean, label=label, color=colour, **marks, **strokes, **z_order)
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    for i, label in enumerate(figure.background):
        legend = {} if i else {"label": f"others ({len(figure.background)})"}
        x, mean = figure.x_of(label), figure.curves[label].mean(0)
        axes.plot(x, mean, color="0.75", linewidth=0.7, zorder=1, **legend)
    axes.set(xlabel=figure.x, ylabel=figure.y, yscale="log" if figure.log else "linear")
    has_whole_positions = all((figure.x_of(label) % 1 == 0).all() for label in figure.curves)
    axes.xaxis.get_major_locator().set_params(integer=has_whole_positions)
    points = max((values.shape[1] for values in figure.curves.values()), default=0)
    if figure.ticks:
        axes.set_xticks(range(1, len(figure.ticks) + 1), figure.ticks)
    elif not figure.positions and points <= MAX_TICKS:
        axes.set_xticks(range(1, points + 1))
    if figure.marks and not figure.log:
        _start_at_zero(axes)
    return _with_legend(picture, axes)


@_draw.register
def _points(figure: Points, order: Mapping[str, int]) -> Any:
    picture, axes = _new_picture((5.2, 3.2))
    if figure.diagonal:
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    front_points = np.array([figure.points[label].mean(0) for label in figure.front]).reshape(-1, 2)
    axes.plot(*front_points.T, color="grey", linewidth=0.8)
    for label, values, colour, style in _with_colours(figure.points, order):
        if len(values):
            axes.scatter(
                *values.T, label=label, color=colour, marker=MARKERS[style], s=18, zorder=3
            )
    axes.set(xlabel=figure.x, ylabel=figure.y)
    _start_at_zero(axes)
    if figure.log:
        _logarithmic(axes)
    return _with_legend(picture, axes)


def _logarithmic(axes: Any) -> None:
    """Make the x axis logarithmic, labelled at powers of ten, on a short axis also at 3 x 10^n."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log")
    axes.margins(x=0.12)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 3e3 * low else (1.0,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)


@_draw.register
def _heat(figure: HeatMap, order: Mapping[str, int]) -> Any:
    values = figure.values
    label_width = max([0.8, *(0.065 * len(label) for label in figure.rows)])  # inches
    size = (max(3.5, 0.5 + label_width + 0.42 * values.shape[1]), 1 + 0.33 * len(values))
    picture, axes = _new_picture(size)
    limits = {"vmin": figure.low, "vmax": figure.high}
    mesh = axes.pcolormesh(np.ma.masked_invalid(values), cmap=MAPS[figure.colours], **limits)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            is_dark = sum(mesh.cmap(mesh.norm(value))[:3]) < 1.6
            alignment = {"ha": "center", "va": "center", "color": "white" if is_dark else "black"}
            axes.text(column + 0.5, row + 0.5, figure.cell(value), fontsize=7.5, **alignment)
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, figure.columns)
    axes.set_yticks(np.arange(len(values)) + 0.5, figure.rows)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return picture


@_draw.register
def _bars(figure: Bars, order: Mapping[str, int]) -> Any:
    label_width = max(0.8, 0.065 * max(map(len, figure.labels)))  # inches
    picture, axes = _new_picture((4.4 + label_width, 1.2 + 0.34 * len(figure.labels)))
    start = np.zeros(len(figure.labels))
    for (part, lengths), colour in zip(figure.parts.items(), COLOURS, strict=False):
        axes.barh(figure.labels, lengths, left=start, label=part, color=colour, height=0.65)
        start += lengths
    axes.invert_yaxis()
    axes.set(xlabel=figure.x)
    return _with_legend(picture, axes) if len(figure.parts) > 1 else picture


@_draw.register
def _image_grid(figure: ImageGrid, order: Mapping[str, int]) -> Any:
    rows, columns = figure.pixels.shape[:2]
    label_width = 0.07 * max(map(len, figure.rows))  # inches
    picture = picture_class()(figsize=(label_width + 0.9 * columns, 0.4 + 0.9 * rows))
    for (row, column), axes in np.ndenumerate(picture.subplots(rows, columns, squeeze=False)):
        axes.imshow(figure.pixels[row, column])
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        if column == 0:
            axes.set_ylabel(figure.rows[row], rotation=0, ha="right", va="center")
        if row == rows - 1:
            axes.set_xlabel(f"{figure.x} {figure.columns[column]}")
    return picture


def _with_colours(
    by_label: Mapping[str, np.ndarray], order: Mapping[str, int], controls: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray, str, int]]:
    """Yield each label with its values, its colour, and the number of earlier uses of it."""
    for i, (label, values) in enumerate(by_label.items()):
        style, number = divmod(order.get(label, i), len(COLOURS))
        colour = COLOURS[number]
        if label in controls:
            colour, style = "black", sorted(controls).index(label)
        yield label, values, colour, style % len(STROKES)


def _with_legend(figure: Any, axes: Any) -> Any:
    """Add a legend below the figure if it has labels; a long legend increases the height."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(4, 80 // (max(map(len, labels)) + 6)))  # about 80 characters fit
        figure.set_figheight(figure.get_figheight() + 0.18 * max(0, len(labels) / columns - 2))
        add_legend(figure, axes, columns, 8)
    return figure


def add_legend(figure: Any, axes: Any, columns: int, font_size: float, **distances: float) -> None:
    """Add a legend below the axes.

    Args:
        figure: Figure of matplotlib.
        axes: Its axes, whose labels the legend shows.
        columns: Number of columns.
        font_size: Size of the letters in points.
        **distances: Distances in units of the font size, arguments of matplotlib's legend.
    """
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=font_size, **place, **distances)


def check_plot(path: Path, option: str = "--plot") -> None:
    """Check that a figure can be written to ``path``.

    Args:
        path: File of the figure.
        option: Option that gives the path, for messages.

    Raises:
        FczooError: matplotlib is not installed, the folder does not exist, or the suffix is not a
            format of matplotlib.
    """
    if not path.absolute().parent.is_dir():
        raise FczooError(f"{option} {path}: no folder {path.parent}; create it first")
    kinds = sorted(picture_class()().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise FczooError(
            f"{option} {path} is not an image file; its suffix must be one of .{', .'.join(kinds)}"
        )


def write_importance(path: Path, importance: Mapping[str, Mapping[str, float]]) -> None:
    """Plot one bar per method: the share of its score's variance that each option explains.

    Args:
        path: File of the figure, which ``check_plot`` must accept.
        importance: Shares of options from 0 to 1 by method.

    Raises:
        FczooError: No method has shares, because of too few options or equal scores.
    """
    shares = {method: options for method, options in importance.items() if options}
    if not shares:
        raise FczooError(
            f"--plot {path} has nothing to show: it needs a method with two or more searched "
            "options and trials with different scores"
        )
    figure = picture_class()(figsize=(8, 0.8 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for row, parts in enumerate(shares.values()):
        bar_start = 0.0
        for colour, (option, share) in zip(COLOURS, parts.items(), strict=False):
            axes.barh(row, 100 * share, left=bar_start, color=colour, edgecolor="white")
            if share >= MIN_LABEL_SHARE:
                axes.text(bar_start + 50 * share, row, option, ha="center", va="center", fontsize=8)
            bar_start += 100 * share
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 100), xlabel="share of the score's variance that an option explains, % (fANOVA)"
    )
    figure.savefig(path, dpi=140)
