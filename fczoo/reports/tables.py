"""Tables of experiments: what stands in them, which value is best, and how they are written."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from scipy.stats import ttest_rel
from tabulate import tabulate

from fczoo.core.metrics import METRICS
from fczoo.core.payload import Content
from fczoo.federation.result import Result
from fczoo.reports.runs import Experiment, Line
from fczoo.security.privacy import TELLS

LEVEL = 0.05  # a difference is told apart from chance below this p-value
Mark = Literal["best", "second", ""]


class Column(NamedTuple):
    """One figure of a run."""

    name: str
    meaning: str
    value: Callable[[Result], float | None]
    show: Callable[[float], str]
    better: Literal["high", "low", ""] = ""  # "": a cost, which is not ranked


@dataclass(frozen=True)
class Entry:
    """One figure of one method: by seed, with mean and, over several seeds, sample standard deviation."""

    by_seed: Mapping[int, float]
    mark: Mark = ""
    open: bool = False  # a paired test does not tell it apart from the best

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


@dataclass(frozen=True)
class Table:
    """Rows of entries; None where the runs did not record a figure."""

    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    seeds: tuple[int, ...]  # number of seeds of each row
    rows: tuple[tuple[Entry | None, ...], ...]


def _percent(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # no -0.0


def _per_upload(total: int, result: Result) -> float:
    return total / max(result.client_rounds, 1) / 1e6


def _uploaded(result: Result, content: Content) -> float | None:
    return _per_upload(result.uploaded.get(content, 0), result) if result.uploaded else None


def _megabytes(size: float | None) -> float | None:
    return None if size is None else size / 1e6


def _three(value: float) -> str:
    return (
        "0" if not value else "<0.001" if value < 0.0005 else f"{value:,.3f}"
    )  # a few bytes are not nothing


_whole = "{:,.0f}".format


MEANINGS = {
    "A_N": "% of all seen test images, after the last task",
    "Avg": "mean of that over the tasks",
    "FAA": "mean of the tasks' accuracies after the last task",
    "Abar": "mean over time of the means over the tasks seen",
    "forgetting": "mean drop of old tasks from their best before the end",
    "forgetting_first": "mean drop since a task was learned, last task counted",
    "forgetting_best": "mean drop from the best, last row and last task counted",
    "BWT": "mean change of old tasks since they were learned",
}


def _metric(name: str) -> Column:
    return Column(
        name,
        MEANINGS[name],
        lambda r: r.metrics[name],
        _percent,
        "low" if name.startswith("forgetting") else "high",
    )


ACCURACY = tuple(map(_metric, METRICS))
COSTS = (
    Column(
        "MB up",
        "a client's upload in a round (1 MB = 10^6 bytes)",
        lambda r: _per_upload(r.bytes_up, r),
        _three,
    ),
    Column("MB down", "a client's download in a round", lambda r: _per_upload(r.bytes_down, r), _three),
    Column("trained", "trained parameters of a client", lambda r: r.trained_scalars, _whole),
    Column(
        "client MB",
        "what a client holds beside the backbone and its images of the task",
        lambda r: _megabytes(r.client_storage),
        _three,
    ),
    Column(
        "server MB",
        "what the server holds beside the backbone",
        lambda r: _megabytes(r.server_storage),
        _three,
    ),
    Column("seconds", "of a run, evaluation included", lambda r: r.seconds, _whole),
    Column(
        "peak MB",
        "largest memory: of the GPU in the run, or without one of the process so far",
        lambda r: _megabytes(r.peak_memory.get("cuda", r.peak_memory.get("process"))),
        _whole,
    ),
)
SEEN = (
    *(
        Column(
            content,
            f"MB of a client's upload in a round that tell the server {tells}",
            partial(_uploaded, content=content),
            _three,
        )
        for content, tells in TELLS.items()
    ),
    Column(
        "rejected",
        "uploads that were turned away, in whole or in part, or never came",
        lambda r: len(r.rejected),
        _whole,
    ),
    Column(
        "epsilon",
        "of (epsilon, delta)-differential privacy of a client's uploads",
        lambda r: r.privacy.get("epsilon"),
        "{:.2f}".format,
    ),
)
COLUMNS = {c.name: c for c in (*ACCURACY, *COSTS, *SEEN)}
SHORT = ("A_N", "Avg", "FAA", "forgetting", "MB up", "seconds")


def make_table(experiment: Experiment, names: Sequence[str]) -> Table:
    """The named columns of an experiment, marked."""
    columns = tuple(COLUMNS[n] for n in names)
    grid = []
    for column in columns:
        entries = [entry_of(line, column) for line in experiment.lines]
        ranked = marked(
            [e if line.competes else None for e, line in zip(entries, experiment.lines, strict=True)], column
        )
        grid.append([m or e for m, e in zip(ranked, entries, strict=True)])
    rows = tuple(zip(*grid, strict=True))
    return Table(
        columns,
        tuple(line.label for line in experiment.lines),
        tuple(len(line.cells) for line in experiment.lines),
        rows,
    )


def entry_of(line: Line, column: Column) -> Entry | None:
    """One figure of one line; None where no run recorded it."""
    values = {s: column.value(r) for s, r in zip(line.seeds, line.results, strict=True)}
    known = {s: float(v) for s, v in values.items() if v is not None and not math.isnan(v)}
    return Entry(known) if known else None


def marked(entries: Sequence[Entry | None], column: Column) -> list[Entry | None]:
    """Entries with the best and the second marked, and with those that the seeds do not tell apart from the best."""
    known = [e for e in entries if e is not None]
    if not column.better or len(known) < 2:
        return list(entries)
    ranked = sorted({round(e.mean, 9) for e in known}, reverse=column.better == "high")
    best = next(e for e in known if round(e.mean, 9) == ranked[0])
    out: list[Entry | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        place = ranked.index(round(entry.mean, 9))
        mark: Mark = "best" if place == 0 else "second" if place == 1 else ""
        out.append(Entry(entry.by_seed, mark, place > 0 and supported(best, entry) is False))
    return out


def supported(a: Entry, b: Entry) -> bool | None:
    """Whether a two-sided paired t test over the seeds that both have tells two entries apart; None with fewer than two seeds."""
    seeds = sorted(set(a.by_seed) & set(b.by_seed))
    if len(seeds) < 2:
        return None
    differences = [a.by_seed[s] - b.by_seed[s] for s in seeds]
    if max(differences) - min(differences) < 1e-9:  # the test divides by their spread
        return abs(differences[0]) > 1e-9
    return bool(ttest_rel([a.by_seed[s] for s in seeds], [b.by_seed[s] for s in seeds]).pvalue < LEVEL)


def number(entry: Entry | None, column: Column) -> str:
    """``72.2``, ``72.2 ± 0.4``, or a dash for what was not recorded."""
    if entry is None:
        return "–"
    mean = column.show(entry.mean)
    return mean if entry.std is None or not column.better else f"{mean} ± {column.show(entry.std)}"


def to_text(table: Table) -> str:
    """For the terminal: ``*`` best, ``°`` second, ``~`` not told apart from the best."""
    return _tabulated(table, "simple", {"best": "*{}", "second": "°{}", "": "{}"}, "{} ~")


def to_markdown(table: Table) -> str:
    """Best bold, second underlined, ``≈`` not told apart from the best."""
    return _tabulated(table, "github", {"best": "**{}**", "second": "<ins>{}</ins>", "": "{}"}, "{} ≈")


def _tabulated(table: Table, style: str, marks: Mapping[str, str], open_mark: str) -> str:
    def cell(entry: Entry | None, column: Column) -> str:
        text = number(entry, column)
        if entry is None:
            return text
        return (open_mark if entry.open else "{}").format(marks[entry.mark].format(text))

    body = [
        [label, *map(cell, row, table.columns), n]
        for label, n, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    names = ["method", *(c.name for c in table.columns), "seeds"]
    return tabulate(
        body, names, tablefmt=style, disable_numparse=True, colalign=("left", *["right"] * (len(names) - 1))
    )


def to_latex(table: Table, caption: str) -> str:
    """A booktabs table; the document needs ``\\usepackage{booktabs}``."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    arrows = {"high": r" $\uparrow$", "low": r" $\downarrow$", "": ""}

    def cell(entry: Entry | None, column: Column) -> str:
        text = number(entry, column).replace("±", r"$\pm$").replace("–", "--").replace("<", "$<$")
        if entry is None:
            return text
        return marks[entry.mark].format(text) + (r"$^{\approx}$" if entry.open else "")

    head = ["Method", *(escape(c.name) + arrows[c.better] for c in table.columns), "Seeds"]
    body = [
        [escape(label), *map(cell, row, table.columns), str(n)]
        for label, n, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
    ]
    lines += [f"{' & '.join(head)} \\\\", r"\midrule", *(f"{' & '.join(row)} \\\\" for row in body)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "dataset",
            "partition",
            "backbone",
            "method",
            "seeds",
            *(f"{name}{end}" for name in COLUMNS for end in ("", " std")),
        ]
    )
    for experiment in experiments:
        table, about = make_table(experiment, list(COLUMNS)), experiment.abouts[0]
        place = [about["settings"]["dataset"], about["partition"]["spec"], about["backbone"]["name"]]
        for label, n, row in zip(table.labels, table.seeds, table.rows, strict=True):
            pairs = [("", "") if e is None else (e.mean, "" if e.std is None else e.std) for e in row]
            writer.writerow([*place, label, n, *(v for pair in pairs for v in pair)])
    return out.getvalue()


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
            "told_apart_from_best": not entry.open,
        }

    return [
        {
            "method": label,
            "seeds": n,
            "values": {c.name: cell(e) for c, e in zip(table.columns, row, strict=True)},
        }
        for label, n, row in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
