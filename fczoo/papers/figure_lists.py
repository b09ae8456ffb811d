"""Lists of the papers' figures with commands, and hyper-parameter analyses as sweeps."""

import itertools

from tabulate import tabulate

from fczoo.papers.paper_figures import PaperFigure, changed_cell, paper_figures
from fczoo.papers.reproduce import cell_arguments, shell_command
from fczoo.reports.text_format import sweep_word


def list_figures(paper: str) -> str:
    """List the figures of a paper with their commands; empty if it has none.

    Hyper-parameter analyses follow as commands of sweeps, with values that users can change.

    Args:
        paper: Key of the paper.
    """
    chosen_figures = [figure for figure in paper_figures().values() if figure.paper == paper]
    rows = [(f.shows, f"fczoo reproduce {f.key}", f.assumed) for f in chosen_figures]
    if not rows:
        return ""
    table = tabulate(rows, ["figure shows", "command", "assumed"], maxcolwidths=50)
    sweeps = [
        f"{figure.key}: {shell_command(command)}"
        for figure in chosen_figures
        for command in sweep_commands(figure)
    ]
    return "\n".join([table, *(["", "The same figures as sweeps:", *sweeps] if sweeps else [])])


def list_analyses(paper: str | None = None) -> str:
    """List the hyper-parameter analyses in the papers' figures, with their commands.

    Args:
        paper: Key of a paper; None: all papers.
    """
    rows = [
        (figure.key, figure.shows, f"fczoo reproduce {figure.key}")
        for figure in paper_figures().values()
        if figure.axes and paper in (None, figure.paper)
    ]
    return tabulate(rows, ["figure", "shows", "command"], maxcolwidths=[None, 60]) if rows else ""


def sweep_commands(figure: PaperFigure) -> list[list[str]]:
    """Return commands of ``fczoo bench --sweep`` for the axes of a figure.

    Args:
        figure: Figure to reproduce.

    Returns:
        Arguments of ``fczoo``: per card one command with all axes, or one per axis; empty without
        axes.
    """
    groups = [list(figure.axes)] if figure.combine else [[axis] for axis in figure.axes]
    commands = []
    for card, group in itertools.product(figure.cards, groups):
        cell = changed_cell(figure, card, {})
        for name in group:
            cell.pop(name, None)
        cell["set"] = [word for word in cell["set"] if word.partition("=")[0] not in group]
        lists = {name: sweep_word(figure.axes[name]) for name in group}
        cell |= {name: lists.pop(name) for name in list(lists) if name in ("dataset", "partition")}
        cell["sweep"] = [f"{name}={values}" for name, values in lists.items()]
        commands.append(["bench", *cell_arguments(cell)])
    return commands
