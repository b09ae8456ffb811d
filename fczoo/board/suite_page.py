"""Markdown page of a suite: tables, tested differences and searched values, from its archive."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from fczoo.board.ranks import draw_critical_difference
from fczoo.board.suite_text import (
    changed_options,
    difference_sentences,
    heading,
    letters_of,
    letters_of_origins,
    origin_table,
    rank_sentence,
    replication_note,
)
from fczoo.core.errors import FczooError
from fczoo.core.files import write_safely
from fczoo.reports.archive import read_archive
from fczoo.reports.captions import describe
from fczoo.reports.drawing import draw
from fczoo.reports.figure_data import Curves
from fczoo.reports.figures import accuracy_curves
from fczoo.reports.run_folder import RunRecord
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import CriticalDifference, critical_difference, interval
from fczoo.reports.suites import REPLICATION, SUITES, Suite, archive_name, suite_experiments
from fczoo.reports.tables import COLUMNS, entry_of

METRICS = ("A_N", "Avg", "FAA", "forgetting", "MB up", "seconds")
DPI = 110
MAX_NAMED_CURVES = 12
HIGHEST_CURVES = 3  # number of rows with the highest last accuracy, which always have names
MAX_NOTES = 15  # lines of notes by hand
MIN_BLOCKS = 3  # smallest number of seeds and settings for critical differences
CURVES = "Accuracy over all classes seen, after each task"
BANDS = "Bands show ± one standard deviation over the seeds; controls are black."
NOTICE = "<!-- written by `fczoo suite report`; notes by hand are in suites/{name}.notes.md -->"


@dataclass(frozen=True)
class Page:
    """Content of a suite's page."""

    name: str
    suite: Suite
    experiments: Sequence[Experiment]  # with rows labelled as in the suite
    # repeated runs, on another machine or at another time, by name in the archive
    replications: Mapping[str, RunRecord] = field(default_factory=dict)
    notes: str = ""
    pictures: bool = False  # whether the page links figures

    @property
    def critical_difference(self) -> CriticalDifference | None:
        """Return mean ranks of methods and controls over seeds and settings."""
        blocks = [block for e in self.experiments for block in _blocks(e, self.suite)]
        return critical_difference(blocks, MIN_BLOCKS)

    @property
    def text(self) -> str:
        """Return the page in Markdown."""
        suite, name = self.suite, self.name
        parts = [NOTICE.format(name=name), f"# Suite {name}", suite.question]
        parts.append(f"```bash\nfczoo suite run {name}\nfczoo suite report {name}\n```")
        if suite.cut:
            parts.append(f"Reduced to save time: {suite.cut}")
        origins = letters_of_origins(self.experiments)
        for number, experiment in enumerate(self.experiments, 1):
            parts += [f"## {heading(experiment)}", describe(experiment)]
            parts.append(self._table(experiment, origins))
            if self.pictures:
                picture = f"pictures/{name}-{number}.png"
                parts += [f"![{CURVES} ({heading(experiment)})]({picture})", f"{CURVES}. {BANDS}"]
        run_labels = {line.label for e in self.experiments for line in e.lines}
        if missing := [row.label for row in suite.rows if row.label not in run_labels]:
            parts.append(f"Not run yet: {', '.join(missing)}.")
        if sentences := difference_sentences(self.experiments, suite.compare):
            parts += ["## Differences", *sentences]
        if ranks := self.critical_difference:
            parts += ["## Ranks", rank_sentence(ranks)]
            if self.pictures and ranks.is_informative:
                parts.append(f"![Mean ranks with critical differences](pictures/{name}-ranks.png)")
        parts += ["## Values", _values(self.experiments), "## Origin", origin_table(origins)]
        if note := replication_note(self.replications.values()):
            parts.append(note)
        if self.notes:
            parts += ["## Notes", self.notes]
        return "\n\n".join(parts) + "\n"

    def _table(self, experiment: Experiment, origins: Mapping[str, str]) -> str:
        """Format the rows by accuracy, with intervals of A_N and differences of replications."""
        a_n, roles = COLUMNS["A_N"], {row.label: row.role for row in self.suite.rows}
        by_accuracy = sorted(
            ((entry.mean if (entry := entry_of(x, a_n)) else -1.0, x) for x in experiment.lines),
            key=lambda pair: -pair[0],
        )
        differences = [_replication_difference(line, self.replications) for _, line in by_accuracy]
        body = []
        for (_, line), difference in zip(by_accuracy, differences, strict=True):
            entry = entry_of(line, a_n)
            bounds = interval(list(entry.by_seed.values())) if entry else None
            cells = []
            for metric in METRICS:
                column, value = COLUMNS[metric], entry_of(line, COLUMNS[metric])
                cells.append(column.show(value.mean) if value else "–")
            interval_text = f"{bounds[0]:.1f} to {bounds[1]:.1f}" if bounds else "–"
            replication_cell = [difference or "–"] if any(differences) else []
            row = [line.label, roles[line.label], cells[0], interval_text, *cells[1:]]
            row += [*replication_cell, str(len(line.records)), letters_of(line, origins)]
            body.append(row)
        replication_head = ["replication"] if any(differences) else []
        head = ["row", "role", "A_N", "95 % interval", *METRICS[1:], *replication_head]
        head += ["seeds", "origin"]
        align = ["left", "left", *["right"] * (len(head) - 3), "left"]
        return tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)


def suite_curves(experiment: Experiment, suite: Suite) -> Curves:
    """Plot the accuracy after each task, as on the page of a suite.

    Curves are in the order of their last value; ablations have none. If there are many rows, only
    controls, rows that the suite compares, and the highest rows have names.

    Args:
        experiment: Runs of the suite in one setting.
        suite: The suite.
    """
    figure, roles = accuracy_curves(experiment), {row.label: row.role for row in suite.rows}
    curves_of_rows = {k: v for k, v in figure.curves.items() if roles[k] != "ablation"}
    curves = dict(sorted(curves_of_rows.items(), key=lambda item: -item[1][:, -1].mean()))
    controls = [label for label in curves if roles[label] == "control"]
    methods = [label for label in curves if label not in controls]
    foreground = {*controls, *methods[:HIGHEST_CURVES]}.union(*suite.compare)
    few = len(curves) <= MAX_NAMED_CURVES
    background = [] if few else [label for label in methods if label not in foreground]
    return replace(figure, curves=curves, controls=controls, background=background)


def curve_colours(suite: Suite, labels: Collection[str]) -> dict[str, int]:
    """Return the number of each named row's colour, with the first colours for compared rows.

    Args:
        suite: The suite.
        labels: Labels of the rows with names, in any of the suite's settings.
    """
    compared_rows = set().union(*suite.compare)
    rows = [row.label for row in suite.rows if row.label in labels and row.role != "control"]
    return {label: i for i, label in enumerate(sorted(rows, key=lambda x: x not in compared_rows))}


def write_page(name: str, suite: Suite, results: Path) -> Path:
    """Write the page and the figures of a suite.

    Args:
        name: Name of the suite.
        suite: The suite.
        results: Folder of ``NAME.csv`` and the page; figures are in its folder ``pictures``.

    Returns:
        File of the page.

    Raises:
        FczooError: The archive is missing or damaged, a row has runs with different code or
            options, or the notes are too long.
    """
    page = replace(read_page(name, suite, results), pictures=True)
    pictures = results / "pictures"
    pictures.mkdir(exist_ok=True)
    for picture in pictures.iterdir():  # the page may have fewer figures than before
        if re.fullmatch(rf"{re.escape(name)}-(\d+|ranks)\.png", picture.name):
            picture.unlink()
    figures = [suite_curves(experiment, suite) for experiment in page.experiments]
    labels = {label for figure in figures for label in figure.curves.keys() - figure.background}
    colours = curve_colours(suite, labels)
    for number, figure in enumerate(figures, 1):
        draw(figure, colours).savefig(pictures / f"{name}-{number}.png", dpi=DPI)
    if (ranks := page.critical_difference) and ranks.is_informative:
        draw_critical_difference(ranks).savefig(pictures / f"{name}-ranks.png", dpi=DPI)
    write_safely(results / f"{name}.md", page.text.encode())
    return results / f"{name}.md"


def read_page(name: str, suite: Suite, results: Path) -> Page:
    """Read the content of a suite's page.

    Args:
        name: Name of the suite.
        suite: The suite.
        results: Folder of ``NAME.csv``.

    Raises:
        FczooError: The archive is missing or damaged, a row has runs with different code or
            options, or the notes are too long.
    """
    archive = results / f"{name}.csv"
    if not archive.is_file():
        raise FczooError(f"no archive {archive}; create it with `fczoo suite run {name}`")
    replication_archive = results / f"{name}{REPLICATION}.csv"
    replications = {
        runs.name: record
        for runs in (read_archive(replication_archive) if replication_archive.is_file() else [])
        for record in runs.records
    }
    return Page(name, suite, suite_experiments(suite, archive), replications, _notes(name, results))


def _replication_difference(line: Line, replications: Mapping[str, RunRecord]) -> str:
    """Format the mean difference of a row's replications to its runs; empty without any."""
    differences = []
    for record, result in zip(line.records, line.results, strict=True):
        replication = replications.get(archive_name(record))
        if replication is None or replication.result is None:
            continue
        same_code = replication.result.versions.get("code") == result.versions.get("code")
        if same_code and replication.result.options == result.options:
            differences.append(replication.result.metrics["A_N"] - result.metrics["A_N"])
    return f"{sum(differences) / len(differences):+.1f}" if differences else ""


def _blocks(experiment: Experiment, suite: Suite) -> list[dict[str, float]]:
    """Return for each seed the A_N by label, of ranked methods and controls."""
    ablations = {row.label for row in suite.rows if row.role == "ablation"}
    entries = {
        line.label: entry
        for line in experiment.lines
        if line.is_ranked and line.label not in ablations
        if (entry := entry_of(line, COLUMNS["A_N"]))
    }
    return [
        {label: e.by_seed[seed] for label, e in entries.items() if seed in e.by_seed}
        for seed in experiment.seeds
    ]


def _notes(name: str, results: Path) -> str:
    file = results / SUITES / f"{name}.notes.md"
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if len(text.splitlines()) > MAX_NOTES:
        raise FczooError(f"{file} has more than {MAX_NOTES} lines; shorten it")
    return text


def _values(experiments: Sequence[Experiment]) -> str:
    """Format a table of each row's search and of the options that differ from the defaults."""
    rows = []
    for experiment in experiments:
        for line in experiment.lines:
            search = line.records[0].search
            effort = f"{search.get('trials')} trials, {search.get('tasks')} tasks"
            score = f"{search['default_score']} → {search['score']}" if "score" in search else "–"
            versions = line.results[0].versions
            cells = [effort if search else "no search", score, changed_options(line)]
            code = [versions.get(name, "unknown")[:8] for name in ("code", "commit")]
            rows.append([line.label, heading(experiment), *cells, *code])
    head = ["row", "setting", "search", "score, first → best", "options set or searched"]
    head += ["code", "commit"]
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)
