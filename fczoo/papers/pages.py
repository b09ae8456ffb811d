"""Output of ``fczoo papers``: the papers' tables, and systems that fczoo lacks."""

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.options import plural
from fczoo.core.registry import METHODS
from fczoo.papers.printed_numbers import (
    Paper,
    PrintedNumber,
    get_paper,
    papers,
    papers_without_table,
)
from fczoo.reports.text_format import word_table


def overview() -> str:
    """List papers and their tables, with the number of printed values."""
    rows = []
    for paper in papers().values():
        for table in dict.fromkeys(n.table for n in paper.numbers):
            numbers = [n for n in paper.numbers if n.table == table]
            summaries = [
                ", ".join(dict.fromkeys(values))
                for values in ([n.dataset for n in numbers], [n.metric for n in numbers])
            ]
            metrics = (
                summaries[1]
                if len(summaries[1]) < 60
                else f"{summaries[1].split(', ')[0]} ... {summaries[1].split(', ')[-1]}"
            )
            rows.append((paper.key, table, len(numbers), summaries[0], metrics))
    citations = "\n".join(f"{p.key}: {p.citation}" for p in papers().values())
    table = tabulate(rows, ["paper", "table", "numbers", "data sets", "metrics"])
    hint = (
        "fczoo papers PAPER TABLE prints a table; "
        "fczoo papers --missing lists what fczoo cannot run."
    )
    return f"{citations}\n\n{table}\n\n{hint}"


def show_paper(key: str, table: str | None) -> str:
    """Format one or all tables of a paper as printed, with protocol and caveats.

    Args:
        key: Key of the paper.
        table: Name of a table; None: all.

    Raises:
        FczooError: The paper or the table is unknown.
    """
    paper = get_paper(key)
    tables = list(dict.fromkeys(n.table for n in paper.numbers))
    chosen_table = table and match(table, tables)
    if table and not chosen_table:
        raise FczooError(f"{paper.key} has no table {table!r}; it has {', '.join(tables)}")
    table_names = [chosen_table] if chosen_table else tables
    code = (
        f"\nSettings of its code: fczoo show release {paper.release} --dataset NAME"
        if paper.release
        else ""
    )
    parts = [
        f"{paper.name}: {paper.citation}\nSettings: fczoo show protocol {paper.key} --dataset "
        f"NAME{code}\nStandard deviations: {paper.spread}",
        *_caveats(paper, ""),
    ]
    for t in table_names:
        numbers = [n for n in paper.numbers if n.table == t]
        for dataset, tasks in dict.fromkeys((n.dataset, n.tasks) for n in numbers):
            block = [n for n in numbers if (n.dataset, n.tasks) == (dataset, tasks)]
            parts.append(f"{t}: {dataset}, {plural(tasks, 'task')}\n{_grid(block)}")
        parts += _caveats(paper, t)
    return "\n\n".join(parts)


def _caveats(paper: Paper, table: str) -> list[str]:
    lines = [f"- {c}" for c in paper.caveats.get(table, [])]
    return (
        [f"{f'Caveats of {table}' if table else 'Caveats'}:\n" + "\n".join(lines)] if lines else []
    )


def _grid(numbers: list[PrintedNumber]) -> str:
    columns = list(dict.fromkeys((n.partition, n.metric) for n in numbers))
    cells = {
        (n.method, n.partition, n.metric): f"{n.value:g}"
        + (f" ± {n.std:g}" if n.std is not None else "")
        for n in numbers
    }
    body = [
        [m, *(cells.get((m, *c), "") for c in columns)]
        for m in dict.fromkeys(n.method for n in numbers)
    ]
    many_partitions = len({p for p, _ in columns}) > 1
    head = [f"{m}\n{p}" if many_partitions or i == 0 else m for i, (p, m) in enumerate(columns)]
    return tabulate(
        body, ["method", *head], disable_numparse=True, colalign=("left", *["right"] * len(columns))
    )


def list_missing() -> str:
    """List the parts of papers' tables that fczoo cannot reproduce.

    These are printed systems without a registered method, rows that no run can follow, costs, and
    papers without a table in fczoo.
    """
    not_implemented: dict[tuple[str, ...], list[PrintedNumber]] = {}
    not_runnable: dict[tuple[str, ...], list[PrintedNumber]] = {}
    costs: dict[tuple[str, ...], list[PrintedNumber]] = {}
    methods = METHODS.names()
    for paper in papers().values():
        for n in paper.numbers:
            row = paper.row(n)
            if row.why:
                not_runnable.setdefault((paper.key, n.method, row.why), []).append(n)
            elif n.our_metric is None:
                costs.setdefault(
                    (paper.key, n.metric, f"a count: fczoo reproduce {paper.key}/{n.table}"), []
                ).append(n)
            elif row.method not in methods:
                not_implemented.setdefault((paper.key, n.method, row.method or "?"), []).append(n)
    parts = (
        (
            not_implemented,
            "Printed systems without an implementation:",
            ["paper", "system", "name here"],
        ),
        (not_runnable, "Rows that fczoo cannot run:", ["paper", "system", "why"]),
        (costs, "Numbers that are not accuracies:", ["paper", "number", "what it is"]),
    )
    paper_rows = [(key, paper.citation, paper.why) for key, paper in papers_without_table().items()]
    table = word_table(paper_rows, ["method", "paper", "why"])
    return "\n\n".join(
        [
            *(_count_table(*part) for part in parts),
            f"Papers whose tables fczoo does not have:\n{table}",
        ]
    )


def _count_table(
    numbers_by_key: dict[tuple[str, ...], list[PrintedNumber]], title: str, head: list[str]
) -> str:
    rows = [
        (*key[:2], len(numbers), ", ".join(dict.fromkeys(n.table for n in numbers)), key[2])
        for key, numbers in numbers_by_key.items()
    ]
    return (
        f"{title}\n{word_table(rows, [*head[:2], 'numbers', 'tables', head[2]])}"
        if rows
        else f"{title} none."
    )
