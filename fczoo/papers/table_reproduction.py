"""Reproduction of whole printed tables: lists, settings files with all cells, and verdicts."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json
from fczoo.core.names import shorten_list
from fczoo.core.options import plural
from fczoo.papers.printed_numbers import Paper, PrintedNumber, choose_numbers, get_paper, papers
from fczoo.papers.reproduce import (
    MAX_LISTED,
    Target,
    card_name,
    cards,
    matches_card,
    verdict,
)
from fczoo.reports.runs import read_experiments


def list_tables(name: str) -> str:
    """List the printed tables of a paper, with the cells that a run can follow.

    Args:
        name: Name of the paper.

    Raises:
        FczooError: The paper is unknown.
    """
    paper, all_cards, rows = get_paper(name), cards(), []
    for table in dict.fromkeys(n.table for n in paper.numbers):
        numbers = [n for n in paper.numbers if n.table == table]
        datasets = dict.fromkeys(paper.row(n).dataset for n in numbers)
        methods = dict.fromkeys(n.method for n in numbers)
        table_cards = _cards_of(numbers, paper, all_cards)
        has_costs = any(n.metric in paper.costs for n in numbers)
        command = f"fczoo reproduce {paper.key}/{table}" if table_cards or has_costs else "-"
        rows.append((table, ", ".join(datasets), len(methods), len(table_cards), command))
    return tabulate(rows, ["table", "data sets", "rows", "cells that run", "command"])


def find_table(name: str) -> tuple[Paper, str] | None:
    """Return the paper and the table with a name ``PAPER/TABLE``; None if there is none.

    Args:
        name: Name of a table or of a card.
    """
    key, _, table_name = name.partition("/")
    for paper in papers().values():
        if paper.key == key.casefold():
            for table in dict.fromkeys(n.table for n in paper.numbers):
                if table.casefold() == table_name.casefold():
                    return paper, table
    return None


def choose_cells(
    paper: Paper, table: str, rows: Sequence[str] = (), patterns: Sequence[str] = ()
) -> list[Target]:
    """Choose cards of a table that a run can follow.

    Args:
        paper: Paper of the table.
        table: Printed name of the table.
        rows: Printed names of rows, or parts of them; empty: all.
        patterns: Patterns of card names, such as ``*dirichlet:0.05*``; empty: all.

    Raises:
        FczooError: A row is unknown, a pattern matches no card, or no card and no cost is left.
    """
    numbers = choose_numbers(paper.numbers, [table], rows)
    table_cards = _cards_of(numbers, paper, cards())
    if not table_cards and (patterns or not any(n.metric in paper.costs for n in numbers)):
        raise FczooError(
            f"fczoo cannot run these rows of {paper.key}/{table}; see fczoo papers --missing"
        )
    for pattern in patterns:
        if not any(fnmatchcase(card.name, pattern) for card in table_cards):
            names = shorten_list([card.name for card in table_cards], MAX_LISTED)
            raise FczooError(
                f"--cells {pattern} matches no cell of {paper.key}/{table}; known: {names}"
            )
    return [
        card
        for card in table_cards
        if not patterns or any(fnmatchcase(card.name, pattern) for pattern in patterns)
    ]


def _cards_of(
    numbers: Sequence[PrintedNumber], paper: Paper, all_cards: Mapping[str, Target]
) -> list[Target]:
    names = dict.fromkeys(card_name(paper, paper.row(n), n) for n in numbers if n.our_metric)
    return [all_cards[name] for name in names if name in all_cards]


def settings_file(name: str, chosen_cards: Sequence[Target], reading: str) -> str:
    """Return the settings file of ``fczoo bench`` that runs some cells of a table.

    Args:
        name: Name of the table, ``PAPER/TABLE``.
        chosen_cards: Cells of the table.
        reading: Reading of the numbers: ``print`` or ``released``.

    Raises:
        FczooError: The reading is ``released`` and a cell does not have it.
    """
    lines = [f"# {plural(len(chosen_cards), 'cell')} of {name}, by `fczoo reproduce {name}`."]
    for card in chosen_cards:
        cell = {"name": card.folder(reading), **card.cell(reading)}
        lines += ["", f"[[cells]]  # {card.name}"]
        lines += [f"{key} = {encode_json(value)}" for key, value in cell.items() if value]
    return "\n".join(lines) + "\n"


def judge_cells(chosen_cards: Sequence[Target], out: Path) -> str:
    """Return one line per cell with its verdict: reproduced, or the reason why not.

    Args:
        chosen_cards: Cells of a table.
        out: Folder of their runs.
    """
    experiments = read_experiments([out])
    return "\n".join(
        f"{card.name}: {verdict(card, experiment, line)}"
        for card in chosen_cards
        for experiment in experiments
        for line in experiment.lines
        if matches_card(card, experiment, line)
    )
