"""Our numbers beside a paper's, with every setting in which the two runs differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.registry import METHODS, PARTITIONERS, create_method
from fczoo.papers.printed import DATASETS, Number, Paper, get_paper, plain_split
from fczoo.reports.columns import COLUMNS
from fczoo.reports.describe import describe
from fczoo.reports.runs import WITHOUT_EFFECT, Experiment, Line, read_experiments
from fczoo.reports.tables import Entry, entry_of
from fczoo.reports.words import setting_word

IGNORED = (*WITHOUT_EFFECT, "partition_seed", "vary")
"""Settings that cannot change what is compared, or that no paper states."""


@dataclass(frozen=True)
class Comparison:
    """One figure of one line beside one printed number."""

    line: Line
    number: Number
    ours: Entry
    differences: tuple[str, ...]  # settings in which the runs differ, e.g. ``rounds 2 (paper: 5)``

    @property
    def gap(self) -> float:
        return self.ours.mean - self.number.value


def compare(places: Sequence[Path], key: str) -> str:
    """Tables of ours and theirs. Raises FczooError where the paper has no number for any of the runs."""
    paper = get_paper(key)
    parts, tables = [], {""}
    for experiment in read_experiments(places):
        found = [c for line in experiment.lines for c in comparisons(experiment, line, paper)]
        if found:
            tables |= {c.number.table for c in found}
            parts += [describe(experiment), _table(found), _differences(found)]
            without = [line.label for line in experiment.lines if not any(c.line is line for c in found)]
            parts += (
                [f"Without a row in {paper.name}'s tables of this data set: {', '.join(without)}."]
                if without
                else []
            )
    if not parts:
        printed = ", ".join(dict.fromkeys(n.dataset for n in paper.numbers if n.dataset in DATASETS))
        raise FczooError(
            f"{paper.name} has no number for the methods and data sets of these runs; its data sets: "
            f"{printed}"
        )
    parts += [
        f"To know about {f'table {t}' if t else paper.name}: {'; '.join(lines)}."
        for t, lines in paper.caveats.items()
        if t in tables
    ]
    return "\n\n".join(parts)


def comparisons(experiment: Experiment, line: Line, paper: Paper) -> list[Comparison]:
    """The paper's numbers for a line's method and data set.

    Those of the same split and number of tasks, if it has any; else all.
    """
    settings, method = experiment.settings, line.results[0].method
    numbers = [
        n
        for n in paper.numbers
        if DATASETS.get(n.dataset) == settings["dataset"]
        and paper.method_here(n)[0] == method
        and n.metric_here is not None
    ]
    split = plain_split(experiment.about.partition["spec"])
    same = [n for n in numbers if n.spec == split and n.tasks == experiment.task_count]
    ours = {n: entry_of(line, COLUMNS[n.metric_here]) for n in same or numbers if n.metric_here}
    return [
        Comparison(line, n, known, tuple(differences(experiment, line, paper, n)))
        for n, known in ours.items()
        if known
    ]


def differences(experiment: Experiment, line: Line, paper: Paper, number: Number) -> list[str]:
    """Every known setting and hyper-parameter in which the runs behind a line and a printed number differ."""
    ours = {
        **experiment.settings,
        "partition": experiment.about.partition["spec"],
        "backbone": experiment.about.backbone["name"],
    }
    try:
        settings = paper.settings(number)
    except FczooError as error:
        return [str(error)]
    stated, theirs = paper.protocol.stated(settings.dataset), through_json(settings.portable())
    found = [*paper.open]
    for name in (
        n for n in theirs if n not in IGNORED and _comparable(n, ours[n]) != _comparable(n, theirs[n])
    ):
        known = name in stated or name in (
            "dataset",
            "tasks",
            "partition",
            "train_per_class",
            "test_per_class",
            "aggregator",
        )
        found.append(
            _differs(name, ours[name], theirs[name])
            if known
            else f"{name} {setting_word(name, ours[name])} (paper: not stated)"
        )
    seeds: tuple[int, ...] = paper.protocol.seeds.given(settings.task_count)
    if len(line.seeds) < len(seeds):
        found.append(_differs("seeds", len(line.seeds), len(seeds)))
    method, options = paper.method_here(number)
    if method in METHODS.names():
        expected = create_method(method, settings.dataset, **{**settings.method_options(method), **options})
        reading = through_json(asdict(expected))
        found += [
            _differs(f"{method}.{k}", v, reading[k])
            for k, v in line.results[0].options.items()
            if k in reading and v != reading[k]
        ]
    return found


def _comparable(name: str, value: Any) -> Any:
    """A setting so that two ways of writing the same are equal."""
    if name == "partition" and not str(value).startswith("file:"):
        return PARTITIONERS.create(value)
    return value


def _differs(name: str, ours: Any, theirs: Any) -> str:
    return f"{name} {setting_word(name, ours)} (paper: {setting_word(name, theirs)})"


def plus_minus(mean: float, std: float | None) -> str:
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def _table(found: Sequence[Comparison]) -> str:
    rows = []
    for c in found:
        n = c.number
        printed = f"{n.method}, {n.table} {n.dataset}, {n.tasks} tasks, {n.partition}"
        verdict = (
            f"no: {len(c.differences)} settings differ" if c.differences else "as far as settings are stated"
        )
        metric = n.metric if n.metric == n.metric_here else f"{n.metric} ({n.metric_here})"
        rows.append(
            (
                c.line.label,
                printed,
                metric,
                plus_minus(c.ours.mean, c.ours.std),
                plus_minus(n.value, n.std),
                f"{c.gap:+.1f}",
                verdict,
            )
        )
    names = ["ours", "paper's row", "metric", "our value", "paper's", "difference", "comparable"]
    return tabulate(
        rows,
        names,
        disable_numparse=True,
        colalign=("left", "left", "left", "right", "right", "right", "left"),
    )


def _differences(found: Sequence[Comparison]) -> str:
    """What differs, once for all rows of one line that differ in the same."""
    shared = [d for d in found[0].differences if all(d in c.differences for c in found)]
    lines = [f"All rows differ in: {', '.join(shared)}."] if shared else []
    seen: dict[tuple[str, str, str], None] = {}
    for c in found:
        own = [d for d in c.differences if d not in shared]
        key = (c.line.label, f"{c.number.method}, {c.number.table} {c.number.partition}", ", ".join(own))
        if own and key not in seen:
            seen[key] = None
            lines.append(f"{key[0]} against {key[1]} differs in: {key[2]}.")
    return "\n".join(lines) or "No stated setting differs."
