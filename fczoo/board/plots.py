"""Single figures for papers: narrow, with small letters and one colour per method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fczoo.board.tsne import MAX_LABELS, OpenBenchmark, tsne_figures
from fczoo.core.errors import FczooError
from fczoo.core.names import fold
from fczoo.core.registry import METHODS
from fczoo.reports.detail_figures import (
    MAX_CLASSES,
    MAX_COLUMNS,
    class_confusion_map,
    client_map,
    confusion_map,
)
from fczoo.reports.drawing import (
    COLOURS,
    MARKERS,
    WITHOUT_DATE,
    add_legend,
    check_plot,
    draw,
    import_matplotlib,
)
from fczoo.reports.figure_data import Curves, Figure, HeatMap, Points
from fczoo.reports.figures import accuracy_against_bytes, accuracy_curves, accuracy_matrix
from fczoo.reports.learning_curves import accuracy_over_bytes, accuracy_over_rounds
from fczoo.reports.paper_style_tables import display_label
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.sweeps import find_sweeps, sweep_figures

Kind = Literal["curves", "rounds", "bytes", "cost", "heatmap", "confusion", "clients", "tsne"]
"""Kind of figure.

``curves``: accuracy after each task. ``rounds``, ``bytes``: accuracy over rounds or bytes sent.
``cost``: final accuracy against all bytes. ``clients``: accuracy for each client. Figures of one
method: ``heatmap``: accuracy on each task after each task. ``confusion``: confusion matrix of tasks
or classes. ``tsne``: features of test images from the stored model.
"""
EXPERIMENT_FIGURES: Mapping[Kind, Callable[[Experiment], Figure | None]] = {
    "curves": accuracy_curves,
    "rounds": accuracy_over_rounds,
    "bytes": accuracy_over_bytes,
    "cost": accuracy_against_bytes,
    "clients": client_map,
}
SUFFIXES = (".pdf", ".svg", ".png")
WIDTH = 3.3  # inches: one column of a two-column paper
FONT_SIZE = 8.0  # points
POINTS = 72.0  # per inch
# in font sizes: width of a letter, height of a line, width of a legend's mark
LETTER, LINE, MARK = 0.6, 1.4, 3.6
ASPECT_RATIO = 0.62  # height of curves and points divided by their width, without the legend
LOOKS = len(COLOURS) * len(MARKERS)  # distinct combinations of colour and marker


def make_plot(
    experiment: Experiment,
    kind: Kind,
    method: str | None = None,
    open_benchmark: OpenBenchmark | None = None,
) -> Figure:
    """Create a figure of an experiment, with names of methods as in their papers.

    Args:
        experiment: Runs that share one table.
        kind: Kind of figure.
        method: Method, or label of its row, for a figure of one method.
        open_benchmark: Function that opens the benchmark of a stored model; ``tsne`` needs it.

    Raises:
        FczooError: The figure shows one method and there are several, the method has no run, or
            the runs did not record the data of the figure.
    """
    if kind in EXPERIMENT_FIGURES:
        figure = EXPERIMENT_FIGURES[kind](experiment)
        if figure is None or _is_empty(figure):
            limit = f", or there are more than {MAX_COLUMNS} clients" if figure is None else ""
            raise FczooError(f"no run recorded the data of --kind {kind}{limit}; give another kind")
        if isinstance(figure, Curves):
            figure = replace(figure, y="accuracy, %")  # papers explain it in the caption
        return _rename(figure, {line.label: display_label(line) for line in experiment.lines})
    line = _choose_line(experiment, kind, method)
    if kind == "heatmap":
        return accuracy_matrix(line)
    if kind == "tsne":
        if open_benchmark is None:
            raise TypeError("tsne needs open_benchmark")
        line_experiment = replace(experiment, lines=(line,))
        many_classes = sum(line.results[0].task_sizes) > MAX_LABELS
        return tsne_figures(line_experiment, "task" if many_classes else "class", open_benchmark)[0]
    figure = class_confusion_map(line) or confusion_map(line)
    if figure is None:
        raise FczooError(
            f"no confusion matrix of {line.label}: it needs run folders (archives do not have it) "
            f"and either at most {MAX_CLASSES} classes, or at most {MAX_COLUMNS} tasks that share "
            "no class"
        )
    return figure


def make_sweep_plot(experiments: Sequence[Experiment], method: str | None = None) -> Curves:
    """Create the figure of the final accuracy over the values of an option or setting.

    Args:
        experiments: Runs with several values.
        method: Method of the sweep, if there are several.

    Raises:
        FczooError: No method was run with several values, or there are several sweeps.
    """
    sweeps = find_sweeps(experiments)
    if method is not None:
        matching_sweeps = [s for s in sweeps if fold(method) in (fold(s.method), fold(s.title))]
        if not matching_sweeps:
            names = ", ".join(dict.fromkeys(s.method for s in sweeps))
            raise FczooError(f"no sweep has method {method!r}; choose --method from: {names}")
        sweeps = matching_sweeps
    figures = sweep_figures(sweeps)
    if len(figures) > 1:
        names = "; ".join(figure.name.removeprefix("sweep ") for figure in figures)
        raise FczooError(
            f"--kind sweep draws one sweep, but there are {len(figures)} ({names}); give --method "
            "or fewer folders, or draw all with fczoo report --sweep --figures FOLDER"
        )
    return figures[0]


def _choose_line(experiment: Experiment, kind: Kind, method: str | None) -> Line:
    """Return the row for a figure of one method."""
    lines = experiment.lines
    if method is not None:
        lines = tuple(
            x for x in lines if fold(method) in (fold(x.label), fold(x.results[0].method))
        )
    if len(lines) == 1:
        return lines[0]
    labels = ", ".join(line.label for line in lines or experiment.lines)
    if method is not None and not lines:
        raise FczooError(f"no row has method {method!r}; choose --method from: {labels}")
    raise FczooError(f"--kind {kind} shows one row; choose --method from: {labels}")


def _is_empty(figure: Figure) -> bool:
    contents = {Curves: "curves", Points: "points", HeatMap: "rows"}
    return not getattr(figure, contents[type(figure)])


def _rename(figure: Figure, names: Mapping[str, str]) -> Figure:
    """Replace the labels of a figure; labels that are not in ``names`` stay."""

    def rename_keys(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {names.get(label, label): value for label, value in values.items()}

    if isinstance(figure, Curves):
        curves, positions = rename_keys(figure.curves), rename_keys(figure.positions)
        return replace(figure, curves=curves, positions=positions)
    if isinstance(figure, Points):
        front = [names.get(label, label) for label in figure.front]
        return replace(figure, points=rename_keys(figure.points), front=front)
    if isinstance(figure, HeatMap):
        return replace(figure, rows=[names.get(label, label) for label in figure.rows])
    return figure


def colour_numbers(experiment: Experiment) -> dict[str, int]:
    """Return colour numbers by row, such that a method has the same colour in every figure.

    The result is empty if rows would look the same: if a method has several rows, or two methods
    have the same colour and marker. Then rows are numbered in their order.

    Args:
        experiment: Runs that share one table.
    """
    names = dict.fromkeys([*METHODS.names("fczoo.methods"), *METHODS.names()])
    numbers = {name: number % LOOKS for number, name in enumerate(names)}
    methods = [line.results[0].method for line in experiment.lines]
    looks = {numbers[method] for method in methods if method in numbers}
    if len(looks) < len(methods):
        return {}
    return {display_label(x): numbers[x.results[0].method] for x in experiment.lines}


def check_plot_file(path: Path) -> None:
    """Check that a figure can be written to a file.

    Args:
        path: File of the figure.

    Raises:
        FczooError: The suffix is not one of ``SUFFIXES``, its folder does not exist, or matplotlib
            is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise FczooError(f"--out {path} must end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    check_plot(path, "--out")


def write_plot(
    figure: Figure, path: Path, width: float = WIDTH, colours: Mapping[str, int] | None = None
) -> None:
    """Write a figure without a title, with a font size of 8 points and selectable text.

    Args:
        figure: Figure to draw.
        path: File that ends with ``.pdf``, ``.svg`` or ``.png``.
        width: Width of the figure in inches.
        colours: Colour number by row label; None: rows are numbered in their order.
    """
    picture = draw(figure, colours)
    _fit(picture, width)
    fonts = {"svg.fonttype": "none", "svg.hashsalt": "fczoo", "pdf.fonttype": 42}
    with import_matplotlib().rc_context(fonts):
        picture.savefig(path, dpi=300, metadata=WITHOUT_DATE.get(path.suffix))


def _fit(picture: Any, width: float) -> None:
    """Scale a figure to a width, with one font size; numbers in cells may be smaller to fit."""
    old_width, height = picture.get_size_inches()
    (axes,) = picture.axes
    has_cells = bool(axes.texts)
    picture.set_size_inches(
        width, height * width / old_width if has_cells else width * ASPECT_RATIO
    )
    axes.tick_params(labelsize=FONT_SIZE)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(FONT_SIZE)
    cell = POINTS * (width - 1) / max(1.0, abs(np.subtract(*axes.get_xlim())))
    for text in axes.texts:
        text.set_fontsize(min(FONT_SIZE, cell / (LETTER * len(text.get_text()))))
    for legend in picture.legends:
        labels = axes.get_legend_handles_labels()[1]
        legend.remove()
        entry = FONT_SIZE * (LETTER * max(map(len, labels)) + MARK) / POINTS
        columns = max(1, min(len(labels), int(width / entry)))
        rows = -(-len(labels) // columns)
        picture.set_figheight(picture.get_figheight() + LINE * FONT_SIZE / POINTS * rows)
        add_legend(picture, axes, columns, FONT_SIZE, columnspacing=1.0, handlelength=1.8)
