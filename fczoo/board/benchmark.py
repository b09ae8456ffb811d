"""One benchmark's part of a page: its rows with all that stands behind them, and its figures."""

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fczoo.board.charts import chart
from fczoo.board.heading import heading
from fczoo.board.ranks import BLOCKS, critical, interval, pairs, shortage
from fczoo.board.traits import Traits, traits
from fczoo.federation.code import digest
from fczoo.reports.columns import COLUMNS, GROUPS, percent
from fczoo.reports.describe import describe, notes
from fczoo.reports.figures import accuracy_matrix, figures
from fczoo.reports.formats import number, to_csv
from fczoo.reports.run_folder import About
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.tables import LEVEL, Entry, Table, entry_of, make_table
from fczoo.reports.words import setting_word

MAIN = ("A_N", "Avg", "forgetting", "MB sent", "seconds")
"""Columns of the first table; all others are below it."""


def benchmark(experiment: Experiment, index: int) -> dict[str, Any]:
    """What the template shows of an experiment, the ``index``-th of its page."""
    lines = ordered(experiment)
    experiment = Experiment(tuple(lines), experiment.unfinished, experiment.runs)
    words = [traits(line) for line in lines]
    drawn = [chart(f) for f in figures(experiment)]
    shown = [f for f in drawn if not f["name"].startswith(("matrix ", "why "))]
    names = {
        cell.place: f"{runs.name}/{cell.method}/seed{cell.seed}"
        for runs in experiment.runs
        for cell in runs.cells
    }
    rows = [
        _row(line, w, f"b{index}-{i}", names) for i, (line, w) in enumerate(zip(lines, words, strict=True))
    ]
    return {
        "id": f"b{index}",
        "heading": heading(experiment),
        "about": describe(experiment).split("\n"),
        "rows": rows,
        "main": _table(make_table(experiment, MAIN)),
        "tables": [_table(make_table(experiment, names)) for names in GROUPS],
        "tested": any(len(line.seeds) > 1 for line in lines),
        "choices": choices(words),
        "charts": [f for f in shown if f["kind"] in ("curves", "points")],
        "others": [f for f in shown if f["kind"] not in ("curves", "points")],
        "diagnostics": [f for f in drawn if f["name"].startswith("why ")],
        "notes": notes(experiment),
        "settings": [(k, setting_word(k, v)) for k, v in experiment.settings.items()],
        "csv": download(to_csv([experiment])),
        **_told_apart(lines),
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


def download(text: str) -> str:
    """An address that holds a CSV file itself."""
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


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
        "commands": _commands([cell.about for cell in line.cells]),
        "facts": _facts(line, names),
        "by_seed": by_seed,
        "matrix": chart(accuracy_matrix(line)),
    }


def _table(table: Table) -> dict[str, Any]:
    arrows = {"high": "↑", "low": "↓", "": ""}

    def cell(entry: Entry | None, i: int) -> dict[str, Any]:
        text = number(entry, table.columns[i])
        if entry is None:
            return {"text": text, "value": "", "mark": "", "open": False}
        return {"text": text, "value": repr(entry.mean), "mark": entry.mark, "open": entry.like_best}

    head = [(c.name, arrows[c.better], c.meaning) for c in table.columns]
    rows = [
        (label, [cell(entry, i) for i, entry in enumerate(row)], seeds)
        for label, row, seeds in zip(table.labels, table.rows, table.seeds, strict=True)
    ]
    return {"head": head, "rows": rows}


def _told_apart(lines: Sequence[Line]) -> dict[str, Any]:
    """Pairs of methods that are tested against each other, and mean ranks over seeds."""
    competing = [(line, entry_of(line, COLUMNS["A_N"])) for line in lines if line.competes]
    entries = [(line.label, entry) for line, entry in competing if entry]
    tested = pairs([entry for _, entry in entries])
    rows = [
        (label, [_pair(tested.get((i, j)), label, entries[j][0]) for j in range(i + 1, len(entries))])
        for i, (label, _) in enumerate(entries)
    ]
    often = {label: entry for label, entry in entries if len(entry.by_seed) >= BLOCKS} or dict(entries)
    first, *others = (entry.by_seed for entry in often.values()) if often else ({},)
    seeds = [seed for seed in first if all(seed in own for own in others)]
    blocks = [{label: entry.by_seed[seed] for label, entry in often.items()} for seed in seeds]
    return {
        "pairs": rows if tested else [],
        "pair_count": len(tested),
        "level": LEVEL,
        "ranks": critical(blocks),
        "shortage": shortage(blocks, "seeds"),
    }


def _pair(pair: Any, better: str, worse: str) -> dict[str, str]:
    """A cell of the table of pairs."""
    if pair is None:
        return {"sign": "", "kind": "untested", "says": f"{better} and {worse}: not tested", "worse": worse}
    kind = "sure" if pair.corrected < LEVEL else "alone" if pair.p < LEVEL else "open"
    return {
        "sign": {"sure": "●", "alone": "○", "open": "≈"}[kind],
        "kind": kind,
        "worse": worse,
        "says": (
            f"{better} − {worse}: {pair.difference:.2f} points over {pair.seeds} seeds, "
            f"p {pair.p:.2g}, corrected {pair.corrected:.2g}"
        ),
    }


CARRYING_ON = re.compile(r" --(?:(?:no-)?(?:resume|accept-changed-code|skip-failed)|jobs[ =]\S+)(?= |$)")
NOTHING_ELSE = re.compile(r"\S+ bench(?: --out[ =](?:'[^']*'|\S+))?")


def _commands(abouts: Sequence[About]) -> list[str]:
    """The commands behind runs, as a shell takes them; those that carried on with the same runs, once."""
    commands: dict[str, None] = {}
    for about in abouts:
        for words in (*about.earlier_commands, about.command):
            told = CARRYING_ON.sub("", shlex.join(words))
            if told and not NOTHING_ELSE.fullmatch(told):
                commands[told] = None
    return list(commands)


def _facts(line: Line, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Where the runs of a line come from: folder, versions, hardware and hashes, each once."""
    facts: dict[tuple[str, str], None] = {}
    for cell, result in zip(line.cells, line.results, strict=True):
        about = cell.about
        facts["run", names[cell.place]] = None
        versions = dict(result.versions or about.versions)
        code = versions.pop("code", digest(about.code) if about.code else "")
        for name, value in {**versions, **about.hardware}.items():
            facts[name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)] = None
        facts["code sha256", code] = None
        facts["device", about.device] = None
        facts["started", about.started or "not recorded"] = None
        facts["backbone sha256", about.backbone["sha256"]] = None
        facts["partition sha256", about.partition["sha256"]] = None
        facts["data sha256", about.data.get("sha256", "")] = None
    return [(name, value) for name, value in facts if value]
