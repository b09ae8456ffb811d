"""Figures of images per client and class: heat map, stacked bars or bubbles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from fczoo.reports.drawing import COLOURS, STYLE, import_matplotlib, picture_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["heatmap", "bars", "bubbles"]
KINDS = get_args(Kind)
FEW_CLASSES = 20  # most classes whose names fit next to the axis


def draw_partition(
    counts: np.ndarray,
    classes: Sequence[str],
    kind: Kind = "heatmap",
    title: str = "",
    order: str = "class",
    task_starts: Sequence[int] = (),
) -> "Figure":
    """Plot the number of images per client and class.

    Args:
        counts: Images [clients, classes].
        classes: Names of the classes.
        kind: ``heatmap``, with a coloured cell per client and class; ``bars``, with a bar per
            client, stacked by class; or ``bubbles``, with areas proportional to the images.
        title: Title of the figure.
        order: Label of the axis of classes, which may describe their order.
        task_starts: First class of each task except the first, for lines between tasks.

    Returns:
        A matplotlib figure, which a notebook shows.

    Raises:
        FczooError: matplotlib is not installed.
    """
    clients, class_count = counts.shape
    with import_matplotlib().rc_context(STYLE):
        size = min(2 + 0.25 * class_count, 24), min(1.5 + 0.25 * clients, 24)  # inches
        figure: Figure = picture_class()(figsize=(7, size[1]) if kind == "bars" else size)
        axes: Any = figure.subplots()
        if kind == "bars":
            draw_bars(axes, counts, classes, order)
        else:
            if kind == "heatmap":
                draw_heat_map(axes, counts)
            else:
                cell = min((size[0] - 2) / class_count, (size[1] - 1.5) / clients)
                draw_bubbles(axes, counts, 72 * cell)
            for start in task_starts:
                axes.axvline(start - 0.5, color="black", linewidth=0.8)
            axes.set(xlabel=f"{order} (lines separate tasks)" if task_starts else order)
            if class_count <= FEW_CLASSES and not task_starts:
                is_short = max(map(len, classes)) <= 2
                rotation: Any = (
                    {} if is_short else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
                )
                axes.set_xticks(range(class_count), classes, **rotation)
                axes.tick_params(axis="x", labelsize=8)
            else:
                axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(ylabel="client", title=title)
        axes.set_ylim(clients - 0.5, -0.5)  # the first client on top
        axes.yaxis.get_major_locator().set_params(integer=True)
    return figure


def draw_heat_map(axes: Any, counts: np.ndarray) -> None:
    """Draw a coloured cell per client and class.

    Args:
        axes: Axes of matplotlib.
        counts: Images [clients, classes].
    """
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        vmin=0,
    )
    axes.spines[:].set_visible(True)
    axes.figure.colorbar(image, label="images (white: none)")


def draw_bars(axes: Any, counts: np.ndarray, classes: Sequence[str], order: str) -> None:
    """Draw a stacked bar per client, as one collection of rectangles for speed.

    Args:
        axes: Axes of matplotlib.
        counts: Images [clients, classes].
        classes: Names of the classes.
        order: Label of the scale of classes.
    """
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    class_count = counts.shape[1]
    rows, columns = np.nonzero(counts)
    stop = counts.cumsum(1)[rows, columns]
    start, low, high = stop - counts[rows, columns], rows - 0.4, rows + 0.4
    corners = np.stack([start, low, stop, low, stop, high, start, high], 1).reshape(-1, 4, 2)
    bars = PolyCollection(
        list(corners),
        array=columns,
        cmap=colormaps["viridis"].resampled(class_count),
        clim=(-0.5, class_count - 0.5),
        edgecolors="white",
        linewidths=0.4 if class_count <= FEW_CLASSES else 0.1,
    )
    axes.add_collection(bars)
    axes.set(xlabel="images", xlim=(0, 1.02 * counts.sum(1).max()))
    scale = axes.figure.colorbar(bars, label=order)
    scale.ax.invert_yaxis()
    if class_count <= FEW_CLASSES:
        scale.set_ticks(range(class_count), labels=classes)
    scale.ax.tick_params(which="both", length=0)


def draw_bubbles(axes: Any, counts: np.ndarray, cell: float) -> None:
    """Draw circles with areas proportional to the images; the largest fills its cell.

    Args:
        axes: Axes of matplotlib.
        counts: Images [clients, classes].
        cell: Width and height of a cell in points.
    """
    rows, columns = np.nonzero(counts)
    areas = (0.95 * cell) ** 2 * counts[rows, columns] / counts.max()
    circles = axes.scatter(columns, rows, areas, color=COLOURS[0], alpha=0.8, linewidths=0)
    axes.set_xlim(-0.5, counts.shape[1] - 0.5)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    handles, labels = circles.legend_elements(
        "sizes",
        num=3,
        fmt="{x:,g}",
        color=COLOURS[0],
        func=lambda area: area * counts.max() / areas.max(),
    )
    axes.figure.legend(
        handles,
        labels,
        title="images",
        loc="outside right upper",
        frameon=False,
        labelspacing=1,
    )
