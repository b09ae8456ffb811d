"""Table formats: plain text, Markdown, LaTeX, CSV and JSON."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fczoo.core.files import encode_json, to_csv_text, write_json, write_safely
from fczoo.reports.captions import conditions, describe, notes, warnings_of
from fczoo.reports.runs import Experiment, read_experiments
from fczoo.reports.significance import SeedValues
from fczoo.reports.tables import GROUPS, Column, Table, all_columns, column_of, make_table
from fczoo.reports.text_format import columns

VALUE_MARKS = {
    "text": {"best": "*{}", "second": "°{}", "": "{}"},
    "markdown": {"best": "**{}**", "second": "<ins>{}</ins>", "": "{}"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"},
}
"""Format of a marked value, by style and mark."""
ARROWS = {"high": r" $\uparrow$", "low": r" $\downarrow$", "": ""}
"""Arrow after a column's name in LaTeX, which shows the better direction."""


def number(entry: SeedValues | None, column: Column) -> str:
    """Format an entry: ``72.2``, ``72.2 ± 0.4``, or a dash if nothing was recorded.

    Args:
        entry: Entry of a row; None: not recorded.
        column: Column of the entry.
    """
    if entry is None:
        return "–"
    mean = column.show(entry.mean)
    return mean if entry.std is None or not column.better else f"{mean} ± {column.show(entry.std)}"


def sign(entry: SeedValues, like_best: str, untested: str) -> str:
    """Return the sign for the test against the best; empty for a significant difference.

    Args:
        entry: Entry of a row.
        like_best: Sign of an entry that does not differ significantly from the best.
        untested: Sign of an entry that was not tested against the best.
    """
    return like_best if entry.like_best else untested if entry.is_untested else ""


def to_text(table: Table, head: str = "method") -> str:
    """Format a table for the terminal.

    Marks: ``*`` best, ``°`` second, ``~`` not significantly different from the best, ``?`` not
    tested against it.

    Args:
        table: Table to format.
        head: Name of the first column.
    """
    return _format_table(table, head, "simple", VALUE_MARKS["text"], ("~", "?"))


def to_markdown(table: Table, head: str = "method") -> str:
    """Format a table in Markdown.

    Best bold, second underlined, ``≈`` not significantly different from the best, ``†`` not tested
    against it.

    Args:
        table: Table to format.
        head: Name of the first column.
    """
    return _format_table(table, head, "github", VALUE_MARKS["markdown"], ("≈", "†"))


def _format_table(
    table: Table, first: str, style: str, marks: Mapping[str, str], signs: tuple[str, str]
) -> str:
    def cell(entry: SeedValues | None, column: Column) -> str:
        text = number(entry, column)
        if entry is None:
            return text
        return marks[entry.mark].format(text) + sign(entry, f" {signs[0]}", f" {signs[1]}")

    body = [
        [label, *map(cell, row, table.columns), seeds]
        for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    head = [first, *(c.name for c in table.columns), "seeds"]
    return tabulate(body, head, tablefmt=style, disable_numparse=True, colalign=_align(head))


def _align(head: Sequence[str]) -> list[str]:
    return ["left", *["right"] * (len(head) - 1)]


def to_latex(table: Table, caption: str, first: str = "Method") -> str:
    r"""Format a booktabs table; the document needs ``\usepackage{booktabs}``.

    Args:
        table: Table to format.
        caption: Its caption, without escapes.
        first: Name of the first column, without escapes.
    """
    marks = VALUE_MARKS["latex"]

    def cell(entry: SeedValues | None, column: Column) -> str:
        text = number(entry, column).replace("±", r"$\pm$").replace("–", "--").replace("<", "$<$")
        if entry is None:
            return text
        return marks[entry.mark].format(text) + sign(entry, r"$^{\approx}$", r"$^{\dagger}$")

    head = [escape(first), *(escape(c.name) + ARROWS[c.better] for c in table.columns), "Seeds"]
    body = [
        [escape(label), *map(cell, row, table.columns), str(seeds)]
        for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    # tabulate's latex_booktabs would escape the marks
    text = tabulate(body, head, tablefmt="latex_raw", disable_numparse=True, colalign=_align(head))
    for rule in ("toprule", "midrule", "bottomrule"):
        text = text.replace(r"\hline", f"\\{rule}", 1)
    return "\n".join(
        [r"\begin{table}", r"\centering", rf"\caption{{{escape(caption)}}}", text, r"\end{table}"]
    )


def escape(text: str) -> str:
    """Escape text for LaTeX.

    Args:
        text: Plain text; line breaks become blanks.
    """
    special_characters = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }
    return "".join(special_characters.get(c, c) for c in text).replace("\n", " ")


def to_csv(experiments: Sequence[Experiment], names: Sequence[str] = ()) -> str:
    """Format unrounded means and standard deviations, one row per method and experiment.

    Args:
        experiments: Experiments in the order of the rows.
        names: Names of the metric columns. Default: all.

    Returns:
        Text of the CSV file with a header row.
    """
    names = names or list(all_columns())
    value_names = [f"{name}{end}" for name in names for end in ("", " std")]
    rows: list[list[object]] = [
        ["dataset", "partition", "backbone", "conditions", "method", "seeds", *value_names, "notes"]
    ]
    for experiment in experiments:
        table, bench_file = make_table(experiment, names), experiment.bench_file
        common = [
            bench_file.settings["dataset"],
            bench_file.partition["spec"],
            bench_file.backbone["name"],
        ]
        common.append("; ".join(conditions(experiment)))
        notes = "; ".join(filter(None, (bench_file.contamination, *warnings_of(experiment))))
        for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True):
            values: list[float | str] = []
            for entry in row:
                if entry is None:
                    values += ["", ""]
                else:
                    values += [entry.mean, "" if entry.std is None else entry.std]
            rows.append([*common, label, seeds, *values, notes])
    return to_csv_text(rows)


def to_json(table: Table) -> list[dict[str, Any]]:
    """Convert a table to unrounded values: mean, standard deviation, value by seed, marks.

    Args:
        table: Table to convert.

    Returns:
        One dictionary per row.
    """

    def cell(entry: SeedValues | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        return {
            "mean": entry.mean,
            "std": entry.std,
            "by_seed": dict(entry.by_seed),
            "mark": entry.mark,
            "significantly_different_from_best": entry.is_different,
        }

    rows = []
    for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True):
        values = {c.name: cell(e) for c, e in zip(table.columns, row, strict=True)}
        rows.append({"method": label, "seeds": seeds, "values": values})
    return rows


MARKS = {
    "text": ("* best, ° second", "~", "?"),
    "markdown": ("Bold: best, underlined: second", "≈", "†"),
    "latex": ("Bold: best, underlined: second", r"$\approx$", r"$\dagger$"),
}
TEST_NOTE = (
    "not significantly different from the best in a paired t test over the seeds "
    "(two-sided, level 0.05, not corrected for the number of methods)"
)
UNTESTED_NOTE = (
    "not tested against the best: fewer than two shared seeds, "
    "or the same difference for every seed"
)


def report(places: Sequence[Path], style: str, names: Sequence[str] = ()) -> str:
    """Format the tables of all runs.

    Args:
        places: Run folders, archives, or folders that contain them.
        style: ``text``, ``markdown``, ``latex``, ``csv`` or ``json``.
        names: Columns of a single table. Default: the tables of ``GROUPS``; in CSV and JSON all
            columns.

    Raises:
        FczooError: No run is finished, two folders have the same run with different results, or a
            name is unknown.
    """
    names = list(dict.fromkeys(column_of(name).name for name in names))
    experiments = read_experiments(places)
    if style == "json":
        return encode_json([as_json(e, names) for e in experiments], indent=1)
    if style == "csv":
        return to_csv(experiments, names)
    return sections(experiments, style, [names] if names else GROUPS)


def sections(experiments: Sequence[Experiment], style: str, groups: Sequence[Sequence[str]]) -> str:
    """Format each experiment: settings, a table per group of columns, and notes.

    The legend follows at the end.

    Args:
        experiments: Experiments in the order of the text.
        style: ``text``, ``markdown`` or ``latex``.
        groups: Names of the columns of each table.
    """
    parts, all_tables = [], []
    for experiment in experiments:
        bench_file = describe(experiment)
        writers: dict[str, Callable[[Table], str]] = {
            "text": to_text,
            "markdown": to_markdown,
            "latex": partial(to_latex, caption=bench_file.replace("\n", ". ")),
        }
        tables = [make_table(experiment, names) for names in groups]
        parts.append("" if style == "latex" else bench_file)  # LaTeX has it as the caption
        parts += map(writers[style], tables)
        parts.append(_as_comment("\n".join(notes(experiment)), style))
        all_tables += tables
    return "\n\n".join(
        part for part in (*parts, _as_comment(legend(all_tables, style), style)) if part
    )


def legend(tables: Sequence[Table], style: str) -> str:
    """Describe columns and marks.

    Args:
        tables: Tables that the legend explains.
        style: ``text``, ``markdown`` or ``latex``.
    """
    table_columns = dict.fromkeys(column for table in tables for column in table.columns)
    meanings = "; ".join(f"{column.name}: {column.meaning}" for column in table_columns)
    entries = [entry for table in tables for row in table.rows for entry in row if entry]
    mark_legend = ""
    if any(entry.mark for entry in entries):
        marks, like_best, untested_sign = MARKS[style]
        many_seeds = any(len(entry.by_seed) > 1 for entry in entries)
        untested_note = (
            f"; {untested_sign} {UNTESTED_NOTE}"
            if any(entry.is_untested for entry in entries)
            else ""
        )
        mark_legend = f"{marks}, {like_best} {TEST_NOTE}{untested_note}. "
        if not many_seeds:
            mark_legend = f"{marks} (one seed: differences are not tested). "
    return textwrap.fill(f"{mark_legend}{meanings}.", min(columns() or 120, 120))


def write_summary(folder: Path) -> None:
    """Write ``summary.{json,csv,md}`` of a run folder's finished runs.

    Args:
        folder: Run folder; its runs are one experiment.

    Raises:
        FczooError: No run is finished.
    """
    (experiment,) = read_experiments([folder])
    write_json(folder / "summary.json", as_json(experiment))
    write_safely(folder / "summary.csv", to_csv([experiment]).encode())
    write_safely(folder / "summary.md", f"{sections([experiment], 'markdown', GROUPS)}\n".encode())


def as_json(experiment: Experiment, names: Sequence[str] = ()) -> dict[str, Any]:
    """Convert an experiment to plain values: description, rows, warnings and unfinished runs.

    Args:
        experiment: Experiment to convert.
        names: Names of the columns. Default: all.
    """
    problems = [
        {"method": c.method, "seed": c.seed, "problem": c.problem}
        for c in experiment.unfinished_runs
    ]
    remarks = {line.label: line.remark for line in experiment.lines if line.remark}
    return {
        "about": describe(experiment),
        "conditions": conditions(experiment),
        "pretraining": experiment.bench_file.contamination,
        "rows": to_json(make_table(experiment, names or all_columns())),
        "remarks": remarks,
        "warnings": warnings_of(experiment),
        "not_finished": problems,
    }


def _as_comment(text: str, style: str) -> str:
    """Prefix the lines of a text as comments, if the style is LaTeX."""
    return textwrap.indent(text, "% ") if style == "latex" else text
