"""How tables are written: plain text, Markdown, LaTeX, CSV and JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from fczoo.core.csv_text import to_csv_text
from fczoo.reports.columns import COLUMNS, Column
from fczoo.reports.contamination import contamination_of
from fczoo.reports.describe import conditions, warnings_of
from fczoo.reports.runs import Experiment
from fczoo.reports.tables import Entry, Table, make_table


def number(entry: Entry | None, column: Column) -> str:
    """``72.2``, ``72.2 ± 0.4``, or a dash for what was not recorded."""
    if entry is None:
        return "–"
    mean = column.show(entry.mean)
    return mean if entry.std is None or not column.better else f"{mean} ± {column.show(entry.std)}"


def sign(entry: Entry, like_best: str, untested: str) -> str:
    """Return the sign of what the test against the best says; empty for a significant difference."""
    return like_best if entry.like_best else untested if entry.untested else ""


def to_text(table: Table) -> str:
    """For the terminal: ``*`` best, ``°`` second, ``~`` not significantly different from the best, ``?`` not
    tested against it.
    """
    return _tabulated(table, "simple", {"best": "*{}", "second": "°{}", "": "{}"}, ("~", "?"))


def to_markdown(table: Table) -> str:
    """Best bold, second underlined, ``≈`` not significantly different from the best, ``†`` not
    tested against it.
    """
    marks = {"best": "**{}**", "second": "<ins>{}</ins>", "": "{}"}
    return _tabulated(table, "github", marks, ("≈", "†"))


def _tabulated(table: Table, style: str, marks: Mapping[str, str], signs: tuple[str, str]) -> str:
    def cell(entry: Entry | None, column: Column) -> str:
        text = number(entry, column)
        if entry is None:
            return text
        return marks[entry.mark].format(text) + sign(entry, f" {signs[0]}", f" {signs[1]}")

    body = [
        [label, *map(cell, row, table.columns), seeds]
        for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    head = ["method", *(c.name for c in table.columns), "seeds"]
    return tabulate(body, head, tablefmt=style, disable_numparse=True, colalign=_align(head))


def _align(head: Sequence[str]) -> list[str]:
    return ["left", *["right"] * (len(head) - 1)]


def to_latex(table: Table, caption: str) -> str:
    """A booktabs table; the document needs ``\\usepackage{booktabs}``."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    arrows = {"high": r" $\uparrow$", "low": r" $\downarrow$", "": ""}

    def cell(entry: Entry | None, column: Column) -> str:
        text = number(entry, column).replace("±", r"$\pm$").replace("–", "--").replace("<", "$<$")
        if entry is None:
            return text
        return marks[entry.mark].format(text) + sign(entry, r"$^{\approx}$", r"$^{\dagger}$")

    head = ["Method", *(escape(c.name) + arrows[c.better] for c in table.columns), "Seeds"]
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
    """Text as LaTeX prints it."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }
    return "".join(special.get(c, c) for c in text).replace("\n", " ")


def to_csv(experiments: Sequence[Experiment]) -> str:
    """Every figure unrounded, as mean and standard deviation; one row a method and experiment."""
    figures = [f"{name}{end}" for name in COLUMNS for end in ("", " std")]
    rows: list[list[object]] = [
        ["dataset", "partition", "backbone", "conditions", "method", "seeds", *figures, "notes"]
    ]
    for experiment in experiments:
        table, about = make_table(experiment, list(COLUMNS)), experiment.about
        common = [about.settings["dataset"], about.partition["spec"], about.backbone["name"]]
        common.append("; ".join(conditions(experiment)))
        notes = "; ".join(filter(None, (contamination_of(about), *warnings_of(experiment))))
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
    """Every figure unrounded: mean, standard deviation, value by seed, marks."""

    def cell(entry: Entry | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        return {
            "mean": entry.mean,
            "std": entry.std,
            "by_seed": dict(entry.by_seed),
            "mark": entry.mark,
            "told_apart_from_best": entry.apart,
        }

    rows = []
    for label, seeds, row in zip(table.labels, table.seeds, table.rows, strict=True):
        values = {c.name: cell(e) for c, e in zip(table.columns, row, strict=True)}
        rows.append({"method": label, "seeds": seeds, "values": values})
    return rows
