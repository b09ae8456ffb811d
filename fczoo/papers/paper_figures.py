"""Figures of papers: their runs as a settings file, and pictures of the results."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, read_toml
from fczoo.core.method import Method
from fczoo.core.names import shorten_list
from fczoo.core.options import plural
from fczoo.federation.diagnostics import read
from fczoo.federation.settings import Settings
from fczoo.papers.printed_numbers import get_paper
from fczoo.papers.reproduce import MAX_LISTED, Cell, Target
from fczoo.papers.table_reproduction import choose_cells
from fczoo.reports.detail_figures import diagnostic_figures
from fczoo.reports.figure_data import Bars, Curves, Figure, HeatMap, Points, number_labels
from fczoo.reports.figures import pareto_front
from fczoo.reports.runs import Line, read_experiments
from fczoo.reports.tables import per_upload
from fczoo.reports.text_format import option_word, short_name

PictureKind = Literal[
    "histograms",
    "distances",
    "traffic",
    "sweep",
    "inference",
    "inversion",
    "lora cosines",
    "weights",
]
Operations = Callable[[Method, Settings], float]
"""Function that returns the operations of predicting one test image."""
Changes = dict[str, Any]
"""Values of a cell by setting or METHOD.OPTION."""
DIAGNOSTIC_NAMES = {"lora cosines": "why lora", "weights": "why reweight"}
"""Prefix of the name of a report's figure with the same content, by kind of picture."""


class PaperFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figure of a paper: its cells, and the picture of their results."""

    shows: str
    draw: PictureKind
    table: str
    cells: list[str]  # patterns of card names of the table
    key: str = ""  # PAPER/FIGURE
    settings: dict[str, Any] = {}  # changes of the cells' settings
    options: dict[str, Any] = {}  # values by METHOD.OPTION
    axes: dict[str, list[Any]] = {}  # values by setting or METHOD.OPTION, varied one at a time
    combine: bool = False  # run all combinations of the axes instead; the first axis is x
    metric: str = "A_N"  # for traffic and sweeps
    assumed: str = ""

    @property
    def paper(self) -> str:
        return self.key.partition("/")[0]

    @property
    def folder(self) -> str:
        return self.key.replace("/", "-")

    @property
    def changes(self) -> list[Changes]:
        """Return the changes of a card, one per cell; empty without axes."""
        if self.combine:
            rows = itertools.product(*self.axes.values())
            return [dict(zip(self.axes, row, strict=True)) for row in rows]
        return [{axis: value} for axis, values in self.axes.items() for value in values]

    @property
    def cards(self) -> list[Target]:
        """Return the cards of a printed table that the figure shows or changes."""
        return choose_cells(get_paper(self.paper), self.table, (), self.cells)


@cache
def paper_figures() -> dict[str, PaperFigure]:
    """Return all figures by ``PAPER/FIGURE``."""
    path = files("fczoo.assets") / "figures.toml"
    content = read_toml(path, "list of figures", dict[str, dict[str, PaperFigure]])
    return {
        f"{paper}/{name}": msgspec.structs.replace(figure, key=f"{paper}/{name}")
        for paper, figures in content.items()
        for name, figure in figures.items()
    }


def find_figure(name: str) -> PaperFigure | None:
    """Return the figure with a name ``PAPER/FIGURE``; None if there is none.

    Args:
        name: Name of a figure, a table or a card; case does not matter.
    """
    by_name = {key.casefold(): figure for key, figure in paper_figures().items()}
    return by_name.get(name.casefold())


def limit_cells(figure: PaperFigure, patterns: Sequence[str]) -> PaperFigure:
    """Limit a figure to some of its cells.

    Args:
        figure: Figure to reproduce.
        patterns: Patterns of card names; empty: all cells.

    Raises:
        FczooError: A pattern fits no cell.
    """
    names = [card.name for card in figure.cards]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = shorten_list(names, MAX_LISTED)
            raise FczooError(f"--cells {pattern} matches no cell of {figure.key}; known: {known}")
    chosen_names = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    return msgspec.structs.replace(figure, cells=chosen_names or names)


def grid(figure: PaperFigure) -> dict[str, Cell]:
    """Return the cells of a figure as options of ``fczoo bench``, by name of the run folder.

    Args:
        figure: Figure to reproduce.
    """
    if not figure.axes:
        return {card.folder(): card.cell() for card in figure.cards}
    return {
        _cell_name(figure, card, changes): changed_cell(figure, card, changes)
        for card in figure.cards
        for changes in figure.changes
    }


def _cell_name(figure: PaperFigure, card: Target, changes: Changes) -> str:
    """Return the name of a cell; axes share the cell of their common starting values."""
    start = {**figure.settings, **figure.options}
    if all(start.get(axis) == value for axis, value in changes.items()):
        return f"{card.row.method}-centre"
    parts = [f"{short_name(axis)}-{option_word(value)}" for axis, value in changes.items()]
    return "-".join([card.row.method or "", *parts]).replace(":", "_")


def changed_cell(figure: PaperFigure, card: Target, changes: Changes) -> Cell:
    """Return the cell of a card, changed by a figure's settings and options and by axes.

    Args:
        figure: Figure with the settings and options.
        card: Card to change.
        changes: Values of axes.
    """
    cell = card.cell()
    options = dict(word.split("=", 1) for word in cell["set"])
    settings = {**figure.settings, **{k: v for k, v in changes.items() if "." not in k}}
    changed_options = {**figure.options, **{k: v for k, v in changes.items() if "." in k}}
    options |= {name: option_word(value) for name, value in changed_options.items()}
    words = {name: option_word(value) for name, value in settings.items()}
    return {**cell, **words, "set": [f"{name}={word}" for name, word in options.items()]}


def grid_file(figure: PaperFigure) -> str:
    """Return the settings file of ``fczoo bench`` that runs a figure's cells.

    Args:
        figure: Figure to reproduce.
    """
    cells = grid(figure)
    lines = [f"# {plural(len(cells), 'cell')} of {figure.key}: {figure.shows}."]
    if figure.draw in ("histograms", "distances", *DIAGNOSTIC_NAMES):
        lines.append("diagnostics = true")
    for name, cell in cells.items():
        lines += ["", "[[cells]]", f"name = {encode_json(name)}"]
        lines += [f"{key} = {encode_json(value)}" for key, value in cell.items() if value]
    return "\n".join(lines) + "\n"


def pictures(figure: PaperFigure, out: Path) -> list[Figure]:
    """Create the pictures of a figure from its runs.

    Args:
        figure: Figure whose cells were run.
        out: Folder of the runs.

    Raises:
        FczooError: A cell has no finished run, or lacks required diagnostics.
    """
    by_cell = _first_lines(figure, out)
    if figure.draw == "sweep":
        axes = list(figure.axes)[:1] if figure.combine else figure.axes
        return [_sweep(figure, axis, by_cell) for axis in axes]
    lines = {_label(card): by_cell[card.folder()] for card in figure.cards}
    if figure.draw == "traffic":
        return [_traffic(figure, lines)]
    if figure.draw in DIAGNOSTIC_NAMES:
        return [_report_figure(figure, label, line) for label, line in lines.items()]
    records = {label: _first_round_records(line) for label, line in lines.items()}
    if figure.draw == "distances":
        return [_distances(figure, records)]
    return [_histograms(figure, label, rounds[0]) for label, rounds in records.items()]


def _first_lines(figure: PaperFigure, out: Path) -> dict[str, Line]:
    """Return the first row of each cell's table, by cell."""
    return {name: read_experiments([out / name])[0].lines[0] for name in grid(figure)}


def lines_by_label(figure: PaperFigure, out: Path) -> dict[str, Line]:
    """Return all rows of a figure's cells by their labels.

    Args:
        figure: Figure whose cells were run.
        out: Folder of the runs.

    Raises:
        FczooError: A cell has no finished run.
    """
    experiments = read_experiments([out / name for name in grid(figure)])
    return {line.label: line for experiment in experiments for line in experiment.lines}


def _label(card: Target) -> str:
    """Return the method of a card, with an addition from the card's name."""
    method, addition = card.row.method or "", card.row.card
    return f"{method} ({addition})" if addition not in ("", method) else method


def _sweep(figure: PaperFigure, axis: str, lines_by_cell: Mapping[str, Line]) -> Curves:
    """Plot one axis, with one curve per card and combination of the other axes."""
    values = figure.axes[axis]
    others = {k: v for k, v in figure.axes.items() if k != axis} if figure.combine else {}
    curves = {}
    for card, row in itertools.product(figure.cards, itertools.product(*others.values())):
        fixed = dict(zip(others, row, strict=True))
        cells = [
            {name: {**fixed, axis: value}[name] for name in figure.axes if name in (axis, *fixed)}
            for value in values
        ]
        lines = [lines_by_cell[_cell_name(figure, card, changes)] for changes in cells]
        numbers = [[result.metrics[figure.metric] for result in line.results] for line in lines]
        words = ", ".join(f"{short_name(k)}={option_word(v)}" for k, v in fixed.items())
        curves[f"{_label(card)} ({words})" if words else _label(card)] = np.array(numbers).T
    is_numeric = all(isinstance(value, int | float) for value in values)
    positions = np.array(values, dtype=float) if is_numeric else np.arange(1, len(values) + 1)
    return Curves(
        name=f"{figure.folder} {short_name(axis)}",
        caption=figure.shows,
        x=short_name(axis),
        y=f"{figure.metric}, %",
        curves=curves,
        positions=dict.fromkeys(curves, positions),
        ticks=() if is_numeric else [option_word(value) for value in values],
    )


def _traffic(figure: PaperFigure, lines: Mapping[str, Line]) -> Points:
    points = {
        label: np.array(
            [
                [per_upload((r.bytes_up + r.bytes_down) / 2, r), r.metrics[figure.metric]]
                for r in line.results
            ]
        )
        for label, line in lines.items()
    }
    return Points(
        name=figure.folder,
        caption=figure.shows,
        x="MB per client and round (mean of up and down)",
        y=f"{figure.metric}, %",
        points=points,
        front=pareto_front({label: values.mean(0) for label, values in points.items()}),
        log=True,
    )


def _report_figure(figure: PaperFigure, label: str, line: Line) -> Figure:
    """Return the report's figure of the same diagnostics, under the paper figure's name."""
    for picture in diagnostic_figures(line):
        if picture.name.startswith(DIAGNOSTIC_NAMES[figure.draw]):
            return dataclasses.replace(picture, name=f"{figure.folder} {label}")
    raise FczooError(f"{line.records[0].place} has no diagnostics; run it with --diagnostics")


def _first_round_records(line: Line) -> list[dict[str, Any]]:
    folder = line.records[0].folder
    records = [r for r in read(folder) if r["kind"] == "first round"] if folder else []
    if not records:
        raise FczooError(
            f"{line.records[0].place} has no diagnostics of first rounds; run it with --diagnostics"
        )
    return records


def _histograms(figure: PaperFigure, label: str, record: Mapping[str, Any]) -> HeatMap:
    clients = record["clients"]
    counts = np.array([client["histogram"] for client in clients], dtype=float)
    return HeatMap(
        name=f"{figure.folder} {label}",
        caption=f"{label}: {figure.shows}",
        x="predicted class",
        y="",
        values=counts,
        rows=[f"client {c['client']}, evenness {c['entropy']:.2f}" for c in clients],
        columns=number_labels(counts.shape[1]),
        colours="purple",
        low=0,
        of_methods=False,
    )


def _distances(figure: PaperFigure, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Curves:
    curves = {
        label: np.array([[np.nan if r["distance"] is None else r["distance"] for r in rounds]])
        for label, rounds in records.items()
    }
    return Curves(
        name=figure.folder,
        caption=figure.shows,
        x="task",
        y="distance of prototypes / length",
        curves=curves,
    )


def inference_costs(figure: PaperFigure, operations: Operations) -> Bars:
    """Plot the operations of predicting one test image by method, which needs no run.

    Args:
        figure: Figure with the cards of the methods.
        operations: Function that counts operations.
    """
    configs = [card.readings[0].config for card in figure.cards]
    counts = [operations(c.create_method(), c.settings) / 1e9 for c in configs]
    return Bars(
        name=figure.folder,
        caption=figure.shows,
        x="GFLOP per test image",
        y="",
        labels=[_label(card) for card in figure.cards],
        parts={"forward": counts},
    )
