"""What ``bench`` and ``report`` print and write about experiments."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fczoo.core.files import encode_json, write_json, write_safely
from fczoo.reports.columns import COLUMNS, GROUPS
from fczoo.reports.contamination import contamination_of
from fczoo.reports.describe import conditions, describe, notes, warnings_of
from fczoo.reports.formats import to_csv, to_json, to_latex, to_markdown, to_text
from fczoo.reports.runs import Experiment, read_experiments
from fczoo.reports.tables import Table, make_table
from fczoo.reports.words import columns

MARKS = {
    "text": ("* best, ° second", "~", "?"),
    "markdown": ("Bold: best, underlined: second", "≈", "†"),
    "latex": ("Bold: best, underlined: second", r"$\approx$", r"$\dagger$"),
}
TEST = (
    "no significant difference to the best by a paired t test over the seeds "
    "(two-sided, p below 0.05, not corrected for the number of methods)"
)
UNTESTED = (
    "not tested against the best: fewer than two seeds in common, or a difference that is the same with "
    "each seed"
)


def report(places: Sequence[Path], style: str) -> str:
    """All tables of the runs at or below some places.

    ``style``: ``text``, ``markdown``, ``latex``, ``csv`` or ``json``.
    """
    experiments = read_experiments(places)
    if style == "json":
        return encode_json([as_json(e) for e in experiments], indent=1)
    if style == "csv":
        return to_csv(experiments)
    return sections(experiments, style, GROUPS)


def sections(experiments: Sequence[Experiment], style: str, groups: Sequence[Sequence[str]]) -> str:
    """For each experiment what was run, a table a group of columns, and notes; at the end the legend."""
    parts, shown = [], []
    for experiment in experiments:
        about = describe(experiment)
        writers: dict[str, Callable[[Table], str]] = {
            "text": to_text,
            "markdown": to_markdown,
            "latex": partial(to_latex, caption=about),
        }
        tables = [make_table(experiment, names) for names in groups]
        parts.append("" if style == "latex" else about)  # there it is the caption
        parts += map(writers[style], tables)
        parts.append(_prefixed("\n".join(notes(experiment)), style))
        shown += tables
    return "\n\n".join(part for part in (*parts, _prefixed(legend(shown, style), style)) if part)


def legend(tables: Sequence[Table], style: str) -> str:
    """What columns and marks mean."""
    shown = dict.fromkeys(column for table in tables for column in table.columns)
    meanings = "; ".join(f"{column.name}: {column.meaning}" for column in shown)
    entries = [entry for table in tables for row in table.rows for entry in row if entry]
    ranked = ""
    if any(entry.mark for entry in entries):
        marks, like_best, untested = MARKS[style]
        tested = any(len(entry.by_seed) > 1 for entry in entries)
        more = f"; {untested} {UNTESTED}" if any(entry.untested for entry in entries) else ""
        ranked = f"{marks}, {like_best} {TEST}{more}. "
        if not tested:
            ranked = f"{marks} (one seed: no difference is tested). "
    return textwrap.fill(f"{ranked}{meanings}.", min(columns() or 120, 120))


def write_summary(folder: Path) -> None:
    """``summary.{json,csv,md}`` of one run folder, from what is finished in it."""
    (experiment,) = read_experiments([folder])
    write_json(folder / "summary.json", as_json(experiment))
    write_safely(folder / "summary.csv", to_csv([experiment]).encode())
    write_safely(folder / "summary.md", f"{sections([experiment], 'markdown', GROUPS)}\n".encode())


def as_json(experiment: Experiment) -> dict[str, Any]:
    """Description, rows with every figure, remarks, and what is not finished."""
    problems = [{"method": c.method, "seed": c.seed, "problem": c.problem} for c in experiment.unfinished]
    remarks = {line.label: line.remark for line in experiment.lines if line.remark}
    return {
        "about": describe(experiment),
        "conditions": conditions(experiment),
        "pretraining": contamination_of(experiment.about),
        "rows": to_json(make_table(experiment, list(COLUMNS))),
        "remarks": remarks,
        "warnings": warnings_of(experiment),
        "not_finished": problems,
    }


def _prefixed(text: str, style: str) -> str:
    """In LaTeX, as comments."""
    return textwrap.indent(text, "% ") if style == "latex" else text
