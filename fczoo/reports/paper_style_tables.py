"""Tables in the style of papers: methods in rows; data, splits and metrics in grouped columns."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.names import fold
from fczoo.core.options import nearest, plural
from fczoo.core.registry import METHODS
from fczoo.reports.captions import conditions, schedule_sources
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import SeedValues
from fczoo.reports.table_formats import ARROWS, TEST_NOTE, VALUE_MARKS, escape, sign
from fczoo.reports.table_formats import MARKS as LEGENDS
from fczoo.reports.tables import Column, column_of, entry_of, mark_entries
from fczoo.reports.text_format import setting_word

LIKE_BEST = {"text": " ~", "markdown": " ≈", "latex": r"$^{\approx}$"}


@dataclass(frozen=True)
class PaperTable:
    """Table of several experiments; an entry is None if the method was not run."""

    fields: tuple[str, ...]  # settings by which the columns are grouped
    headings: tuple[tuple[str, ...], ...]  # values of these settings, one tuple per experiment
    columns: tuple[Column, ...]  # the metrics of each experiment
    labels: tuple[str, ...]
    rows: tuple[tuple[SeedValues | None, ...], ...]  # entries by experiment, then by metric
    rules: tuple[int, ...]  # rows below a rule that separates groups
    caption: str


def make_paper_table(
    experiments: Sequence[Experiment],
    fields: Sequence[str],
    metrics: Sequence[str],
    methods: Sequence[str] = (),
    group_of: Callable[[str], str] | None = None,
) -> PaperTable:
    """Arrange experiments side by side in one table.

    Args:
        experiments: Experiments, one per group of columns.
        fields: Settings that distinguish the experiments, outermost first: ``data``, ``partition``
            or any other field of ``Settings``.
        metrics: Names of metrics, keys of ``COLUMNS`` or such as ``rounds@70``.
        methods: Methods to show, in this order. Default: all, in the order of the runs.
        group_of: Returns the group of a method; a rule separates rows of different groups.

    Raises:
        FczooError: A field, metric or method is unknown, or two experiments have the same values of
            the fields.
    """
    columns = tuple(column_of(name) for name in dict.fromkeys(metrics))
    headings = [tuple(_value(e, field) for field in fields) for e in experiments]
    for first, second in itertools.combinations(range(len(headings)), 2):
        if headings[first] == headings[second]:
            _refuse_same_heading(experiments[first], experiments[second], headings[first])
    order = sorted(
        range(len(headings)),
        key=lambda i: [headings.index(heading) for heading in _first_headings(headings, i)],
    )
    experiments, headings = [experiments[i] for i in order], [headings[i] for i in order]
    lines = _rows(experiments, methods)
    by_column = []
    for experiment, column in itertools.product(experiments, columns):
        lines_by_label = {line.label: line for line in experiment.lines}
        entries = [
            entry_of(lines_by_label[x], column) if x in lines_by_label else None for x in lines
        ]
        is_ranked = [x in lines_by_label and lines_by_label[x].is_ranked for x in lines]
        ranked_entries = [e if c else None for e, c in zip(entries, is_ranked, strict=True)]
        marked_entries = mark_entries(ranked_entries, column)
        by_column.append([m or e for m, e in zip(marked_entries, entries, strict=True)])
    names = [line.results[0].method for line in lines.values()]
    groups = [group_of(name) for name in names] if group_of else []
    rules = [i for i, (a, b) in enumerate(itertools.pairwise(groups), start=1) if a != b]
    return PaperTable(
        tuple(fields),
        tuple(headings),
        columns,
        tuple(display_label(line) for line in lines.values()),
        tuple(zip(*by_column, strict=True)),
        tuple(rules),
        _caption(experiments, fields, columns),
    )


def _value(experiment: Experiment, field: str) -> str:
    """Return the value of a setting of an experiment, as in a column's heading."""
    settings = experiment.settings
    if field in ("data", "dataset"):
        return str(settings["dataset"])
    if field == "partition":
        return str(experiment.bench_file.partition["spec"])
    if field == "backbone":
        return str(experiment.bench_file.backbone["name"])
    name = field.replace("-", "_")
    if name not in settings:
        raise FczooError(f"no setting is called {field!r}; {nearest(field, ['data', *settings])}")
    value = settings[name]
    word = setting_word(name, value)
    return word if isinstance(value, str) else f"{field} {word}"


def _first_headings(headings: Sequence[tuple[str, ...]], index: int) -> list[tuple[str, ...]]:
    """Return the first place with each prefix of a place, a sort key that groups equal headings."""
    heading = headings[index]
    return [
        next(other for other in headings if other[: depth + 1] == heading[: depth + 1])
        for depth in range(len(heading))
    ]


def _refuse_same_heading(first: Experiment, second: Experiment, heading: tuple[str, ...]) -> None:
    differing_names = [
        name
        for name, value in first.settings.items()
        if value != second.settings[name] and name not in ("data_root", "device")
    ]
    reason = ", ".join(differing_names) or "images, partition or weights"
    advice = f"add {differing_names[0]} to --columns, or " if differing_names else ""
    location = ", ".join(heading) or "the same column"
    raise FczooError(
        f"two experiments are for {location} but differ in {reason}; {advice}give fewer folders"
    )


def _rows(experiments: Sequence[Experiment], methods: Sequence[str]) -> dict[str, Line]:
    """Return the rows by label, each with the first experiment's line of this label."""
    lines: dict[str, Line] = {}
    for experiment in experiments:
        for line in experiment.lines:
            lines.setdefault(line.label, line)
    if not methods:
        return lines
    known_methods = dict.fromkeys(line.results[0].method for line in lines.values())
    chosen_lines: dict[str, Line] = {}
    for name in methods:
        matching_lines = {
            k: x for k, x in lines.items() if fold(name) in map(fold, (k, x.results[0].method))
        }
        if not matching_lines:
            raise FczooError(f"no run has method {name!r}; {nearest(name, known_methods)}")
        chosen_lines |= matching_lines
    return chosen_lines


def display_label(line: Line) -> str:
    """Return the label of a row, with the method's name as in its paper.

    Args:
        line: Row of an experiment.
    """
    name = line.results[0].method
    return display_name(name) + line.label.removeprefix(name)


def display_name(name: str) -> str:
    """Return the name of a method as in its paper; ``name`` if the method is not installed.

    Args:
        name: Registered name.
    """
    if name not in METHODS.names():
        return name
    method = METHODS.get(name)
    return str(vars(method).get("title") or method.__name__)


def _caption(
    experiments: Sequence[Experiment], fields: Sequence[str], columns: Sequence[Column]
) -> str:
    """Describe backbone, protocol and schedule where all columns agree, and the metrics."""
    first = experiments[0].settings
    backbones = (
        {e.bench_file.backbone["name"] for e in experiments} if "backbone" not in fields else ()
    )
    parts = [
        ", ".join(sorted(backbones)),
        ", ".join(schedule_sources(first)) if _are_equal(experiments, "protocol") else "",
        *(
            plural(first[f"{name}s"], name)
            for name in ("client", "round", "epoch")
            if f"{name}s" not in fields and _are_equal(experiments, f"{name}s")
        ),
        *dict.fromkeys(condition for e in experiments for condition in conditions(e)),
    ]
    counts = sorted({len(e.seeds) for e in experiments})
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    std_text = f"Mean ± standard deviation over {number} seeds" if counts[-1] > 1 else "One seed"
    metrics = "; ".join(f"{column.name}: {column.meaning}" for column in columns)
    return f"{'; '.join(filter(None, parts))}. {std_text}. {metrics}."


def _are_equal(experiments: Sequence[Experiment], name: str) -> bool:
    return all(e.settings[name] == experiments[0].settings[name] for e in experiments)


def to_paper(table: PaperTable, style: str, label: str = "tab:fczoo") -> str:
    r"""Format a table.

    Args:
        table: Table to format.
        style: ``latex`` (needs ``\usepackage{booktabs}``), ``markdown`` or ``text``.
        label: Label of the table in LaTeX.
    """
    return _to_latex(table, label) if style == "latex" else _to_plain(table, style)


def _cell(entry: SeedValues | None, column: Column, style: str) -> str:
    """Format a mean, with its standard deviation small in LaTeX."""
    if entry is None:
        return "--" if style == "latex" else "–"
    mean = column.show(entry.mean)
    text = VALUE_MARKS[style][entry.mark].format(
        mean.replace("<", "$<$") if style == "latex" else mean
    )
    if entry.std is None or not column.better:
        return text
    std_text = column.show(entry.std)
    text += f" {{\\tiny $\\pm$ {std_text}}}" if style == "latex" else f" ± {std_text}"
    return text + sign(entry, LIKE_BEST[style], "")


def _body(table: PaperTable, style: str) -> list[list[str]]:
    columns = table.columns * len(table.headings)
    return [
        [label, *(_cell(entry, column, style) for entry, column in zip(row, columns, strict=True))]
        for label, row in zip(table.labels, table.rows, strict=True)
    ]


def _to_plain(table: PaperTable, style: str) -> str:
    heads = [
        "\n".join([*heading, column.name])
        if style == "text"
        else " / ".join([*heading, column.name])
        for heading in table.headings
        for column in table.columns
    ]
    align = ["left", *["right"] * len(heads)]
    text = tabulate(
        _body(table, style),
        ["method", *heads],
        tablefmt="github" if style == "markdown" else "simple",
        disable_numparse=True,
        colalign=align,
    )
    return f"{text}\n\n{table.caption} {_mark_legend(table, style)}"


def _to_latex(table: PaperTable, label: str) -> str:
    columns = table.columns * len(table.headings)
    head = []
    for depth in range(len(table.fields)):
        spans = _spans([p[: depth + 1] for p in table.headings for _ in table.columns])
        cells = [rf"\multicolumn{{{n}}}{{c}}{{{escape(key[-1])}}}" for key, _, n in spans]
        rules = [rf"\cmidrule(lr){{{start + 2}-{start + n + 1}}}" for _, start, n in spans]
        head += [" & ".join(["", *cells]) + r" \\", " ".join(rules)]
    names = [escape(c.name) + ARROWS[c.better] for c in columns]
    head.append(" & ".join(["Method", *names]) + r" \\")
    body = []
    for number, (name, *cells) in enumerate(_body(table, "latex")):
        body += [r"\midrule"] if number in table.rules else []
        body.append(" & ".join([escape(name), *cells]) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_math(escape(table.caption))} {_mark_legend(table, 'latex')}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            *head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _mark_legend(table: PaperTable, style: str) -> str:
    """Describe the marks of the best values, and the significance test if there is one."""
    entries = [entry for row in table.rows for entry in row if entry is not None]
    if not any(entry.mark for entry in entries):
        return ""
    marks, like_best, _ = LEGENDS[style]
    tested = any(entry.is_different is not None for entry in entries)
    return f"{marks}{f'; {like_best} {TEST_NOTE}' if tested else ''}."


def _math(text: str) -> str:
    return text.replace("±", r"$\pm$")


def _spans(keys: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], int, int]]:
    """Group equal neighbours; return key, first index and length of each group."""
    spans, start = [], 0
    for key, same in itertools.groupby(keys):
        length = len(list(same))
        spans.append((key, start, length))
        start += length
    return spans
