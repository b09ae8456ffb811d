"""One benchmark's part of a page: its rows with all that stands behind them, and its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from fczoo.board.charts import chart
from fczoo.board.download import download
from fczoo.board.heading import heading
from fczoo.board.provenance import commands, facts
from fczoo.board.told_apart import told_apart
from fczoo.board.traits import Traits, traits
from fczoo.reports.columns import COLUMNS, GROUPS, percent
from fczoo.reports.describe import describe, notes
from fczoo.reports.figures import accuracy_matrix, overview
from fczoo.reports.formats import number, sign, to_csv
from fczoo.reports.insights import insights
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.tables import Entry, Table, entry_of, interval, make_table
from fczoo.reports.words import setting_word

MAIN = ("A_N", "Avg", "forgetting", "MB sent", "seconds")
"""Columns of the first table; all others are below it."""


def benchmark(experiment: Experiment, index: int, order: Mapping[str, int]) -> dict[str, Any]:
    """What the template shows of an experiment, the ``index``-th of its page.

    ``order`` numbers the colours of rows.
    """
    lines = ordered(experiment)
    experiment = Experiment(tuple(lines), experiment.unfinished, experiment.runs)
    words = [traits(line) for line in lines]
    drawn = [chart(figure) for figure in overview(experiment)]
    names = {
        cell.place: f"{runs.name}/{cell.method}/seed{cell.seed}"
        for runs in experiment.runs
        for cell in runs.cells
    }
    rows = [
        _row(line, w, f"b{index}-{i}", names) for i, (line, w) in enumerate(zip(lines, words, strict=True))
    ]
    for row in rows:
        row["colour"] = order[row["label"]]
    return {
        "id": f"b{index}",
        "heading": heading(experiment),
        "about": describe(experiment).split("\n"),
        "rows": rows,
        "main": _table(make_table(experiment, MAIN)),
        "tables": [_table(make_table(experiment, group)) for group in GROUPS],
        "tested": any(len(line.seeds) > 1 for line in lines),
        "choices": choices(words),
        "charts": [f for f in drawn if f["kind"] in ("curves", "points")],
        "others": [f for f in drawn if f["kind"] not in ("curves", "points")],
        "diagnostics": [chart(figure) for line in lines for figure in insights(line)],
        "notes": notes(experiment),
        "settings": [(k, setting_word(k, v)) for k, v in experiment.settings.items()],
        "csv": download(to_csv([experiment])),
        **told_apart(lines),
    }


def ordered(experiment: Experiment) -> list[Line]:
    """The lines by A_N, best first; those that do not compete last."""

    def key(line: Line) -> tuple[bool, float]:
        entry = entry_of(line, COLUMNS["A_N"])
        return not line.competes, -entry.mean if entry else 0.0

    return sorted(experiment.lines, key=key)


def choices(found: Sequence[Traits]) -> dict[str, list[str]]:
    """For each filter the words that some row has, sorted."""
    words: dict[str, set[str]] = {}
    for each in found:
        for name, own in each.words().items():
            words.setdefault(name, set()).update(own)
    return {name: sorted(own) for name, own in words.items()}


def _row(line: Line, words: Traits, anchor: str, names: Mapping[str, str]) -> dict[str, Any]:
    """A line of the table, and all that is known of its runs; ``names`` has their names by their place."""
    accuracy = entry_of(line, COLUMNS["A_N"])
    bounds = interval(list(accuracy.by_seed.values())) if accuracy else None
    entries = [(COLUMNS[name], entry_of(line, COLUMNS[name])) for name in MAIN]
    by_seed = [
        (seed, [column.show(e.by_seed[seed]) if e and seed in e.by_seed else "–" for column, e in entries])
        for seed in line.seeds
    ]
    return {
        "label": line.label,
        "anchor": anchor,
        "words": words.words(),
        "family": words.family,
        "interval": f"{percent(bounds[0])} to {percent(bounds[1])}" if bounds else "",
        "remark": line.remark,
        "options": [(k, setting_word(k, v)) for k, v in line.results[0].options.items()],
        "commands": commands([cell.about for cell in line.cells]),
        "facts": facts(line, names),
        "by_seed": by_seed,
        "matrix": chart(accuracy_matrix(line)),
    }


def _table(table: Table) -> dict[str, Any]:
    arrows = {"high": "↑", "low": "↓", "": ""}

    def cell(entry: Entry | None, i: int) -> dict[str, Any]:
        text = number(entry, table.columns[i])
        if entry is None:
            return {"text": text, "value": "", "mark": "", "sign": ""}
        tested = sign(entry, "≈", "†")
        return {"text": text, "value": repr(entry.mean), "mark": entry.mark, "sign": tested}

    head = [(c.name, arrows[c.better], c.meaning) for c in table.columns]
    rows = [
        (label, [cell(entry, i) for i, entry in enumerate(row)], seeds)
        for label, row, seeds in zip(table.labels, table.rows, table.seeds, strict=True)
    ]
    return {"head": head, "rows": rows}
