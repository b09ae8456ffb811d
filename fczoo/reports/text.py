"""What ``bench`` and ``report`` print and write about experiments."""

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from fczoo.core.files import through_json, write_json, write_safely
from fczoo.core.registry import METHODS
from fczoo.reports.runs import Experiment, Line, read_experiments
from fczoo.reports.tables import (
    ACCURACY,
    COLUMNS,
    COSTS,
    SEEN,
    Table,
    make_table,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_text,
)

FORMATS = ("text", "markdown", "latex", "csv", "json")
GROUPS = tuple(tuple(c.name for c in group) for group in (ACCURACY, COSTS, SEEN))
MARKS = {
    "text": ("* best, ° second", "~"),
    "markdown": ("Bold: best, underlined: second", "≈"),
    "latex": ("Bold: best, underlined: second", r"$\approx$"),
}
TEST = "not told apart from the best by a paired t test over the seeds (two-sided, p < 0.05, not corrected for the number of methods)"


def report(places: Sequence[Path], style: str) -> str:
    """All tables of the run folders at or below some places, in one of ``FORMATS``."""
    experiments = read_experiments(places)
    if style == "json":
        return json.dumps([as_json(e) for e in experiments], indent=1)
    if style == "csv":
        return to_csv(experiments)
    return sections(experiments, style, GROUPS)


def sections(experiments: Sequence[Experiment], style: str, groups: Sequence[Sequence[str]]) -> str:
    """For each experiment what was run, a table for each group of columns and what is not finished; at the end the legend."""
    parts, shown = [], []
    for e in experiments:
        tables = [make_table(e, names) for names in groups]
        writers: dict[str, Callable[[Table], str]] = {
            "text": to_text,
            "markdown": to_markdown,
            "latex": partial(to_latex, caption=e.describe()),
        }
        parts += [
            "" if style == "latex" else e.describe(),
            *map(writers[style], tables),
            _prefixed("\n".join(notes(e)), style),
        ]
        shown += tables
    return "\n\n".join(p for p in (*parts, _prefixed(legend(shown, style), style)) if p)


def legend(tables: Sequence[Table], style: str) -> str:
    """What columns and marks mean."""
    columns = "; ".join(f"{c.name}: {c.meaning}" for c in dict.fromkeys(c for t in tables for c in t.columns))
    entries = [e for t in tables for row in t.rows for e in row if e]
    marks, sign = MARKS[style]
    tested = any(len(e.by_seed) > 1 for e in entries)
    ranked = (
        f"{marks}{f', {sign} {TEST}' if tested else ' (one seed: no difference is tested)'}. "
        if any(e.mark for e in entries)
        else ""
    )
    return textwrap.fill(f"{ranked}{columns}.", 120)


def notes(experiment: Experiment) -> list[str]:
    """What must be known of single methods, and one line for each run that has no final numbers."""
    remarks = [f"{line.label}: {line.remark}" for line in experiment.lines if line.remark]
    remarks += [
        f"{line.label}: {text}"
        for line in experiment.lines
        for text in (_changed(line), _rejections(line))
        if text
    ]
    return remarks + [f"not finished: {c.method} seed {c.seed}: {c.problem}" for c in experiment.unfinished]


def _changed(line: Line) -> str:
    """The options of a method that are not its defaults: the data set's, the protocol's or the user's."""
    name, options = line.cells[0].method, line.results[0].options
    if name not in METHODS.names():  # a plug-in that is not installed here
        return ""
    defaults = through_json({f.name: f.default for f in fields(METHODS.get(name))})
    changed = [f"{k}={v}" for k, v in options.items() if k in defaults and v != defaults[k]]
    return f"{', '.join(changed)}, other than by default" if changed else ""


def _rejections(line: Line) -> str:
    """How many uploads were turned away or lost, with the three most frequent reasons."""
    reasons = Counter(r["reason"] for result in line.results for r in result.rejected)
    often = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3))
    return (
        f"uploads turned away or lost: {reasons.total()}, {often}{'; …' if len(reasons) > 3 else ''}"
        if reasons
        else ""
    )


def write_summary(folder: Path) -> None:
    """``summary.{json,csv,md}`` of one run folder, from what is finished in it."""
    (experiment,) = read_experiments([folder])
    write_json(folder / "summary.json", as_json(experiment))
    write_safely(folder / "summary.csv", to_csv([experiment]).encode())
    write_safely(folder / "summary.md", f"{sections([experiment], 'markdown', GROUPS)}\n".encode())


def as_json(experiment: Experiment) -> dict[str, object]:
    """Description, rows with every figure, remarks, and what is not finished."""
    problems = [{"method": c.method, "seed": c.seed, "problem": c.problem} for c in experiment.unfinished]
    remarks = {line.label: line.remark for line in experiment.lines if line.remark}
    return {
        "about": experiment.describe(),
        "rows": to_json(make_table(experiment, list(COLUMNS))),
        "remarks": remarks,
        "not_finished": problems,
    }


def _prefixed(text: str, style: str) -> str:
    """In LaTeX, as comments."""
    return textwrap.indent(text, "% ") if style == "latex" else text
