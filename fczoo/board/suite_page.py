"""The page of a suite: tables, tested differences and searched values, from its archive only."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from fczoo.board.ranks import holm
from fczoo.core.errors import FczooError
from fczoo.core.files import write_safely
from fczoo.core.options import plural
from fczoo.core.registry import METHODS
from fczoo.reports.archive import read_archive
from fczoo.reports.captions import describe
from fczoo.reports.drawing import draw
from fczoo.reports.figures import accuracy_curves
from fczoo.reports.run_config import recorded_config
from fczoo.reports.runs import Experiment, Line, experiments_of
from fczoo.reports.significance import LEVEL, interval, p_value
from fczoo.reports.suites import SUITES, Suite, SuiteRow
from fczoo.reports.tables import COLUMNS, entry_of
from fczoo.reports.text_format import option_word

METRICS = ("A_N", "Avg", "FAA", "forgetting", "MB up", "seconds")
DPI = 110
MAX_NOTES = 15  # lines by hand
NOTICE = "<!-- written by `fczoo suite report`; notes by hand are in suites/{name}.notes.md -->"


def write_page(name: str, suite: Suite, results: Path) -> Path:
    """Write the page and the figures of a suite.

    Args:
        name: Name of the suite.
        suite: The suite.
        results: Folder of ``NAME.csv``, of the page and of the figures.

    Returns:
        The page.

    Raises:
        FczooError: The archive is missing or damaged, or the notes are too long.
    """
    archive = results / f"{name}.csv"
    if not archive.is_file():
        raise FczooError(f"{archive} is missing; write it with `fczoo suite run {name}`")
    experiments = [_label_rows(e) for e in experiments_of(read_archive(archive), str(archive))]
    pictures = []
    for number, experiment in enumerate(experiments, 1):
        picture = f"pictures/{name}-{number}.png"
        (results / picture).parent.mkdir(exist_ok=True)
        draw(accuracy_curves(experiment)).savefig(results / picture, dpi=DPI)
        pictures.append(picture)
    write_safely(
        results / f"{name}.md",
        page_text(name, suite, experiments, _notes(name, results), pictures).encode(),
    )
    return results / f"{name}.md"


def page_text(
    name: str,
    suite: Suite,
    experiments: Sequence[Experiment],
    notes: str = "",
    pictures: Sequence[str] = (),
) -> str:
    """Return the page of a suite in Markdown.

    Args:
        name: Name of the suite.
        suite: The suite.
        experiments: Its runs, with rows labelled as in the suite.
        notes: Text by hand.
        pictures: Paths of figures, one per experiment or none.
    """
    roles = {row.label: row for row in suite.rows}
    parts = [NOTICE.format(name=name), f"# Suite {name}", suite.question]
    parts.append(f"```bash\nfczoo suite run {name}\n```")
    if suite.cut:
        parts.append(f"Left out: {suite.cut}")
    for number, experiment in enumerate(experiments):
        parts += [f"## {_heading(experiment)}", describe(experiment), _table(experiment, roles)]
        if number < len(pictures):
            parts.append(f"![Accuracy over all classes seen, after each task]({pictures[number]})")
        parts += _differences(experiment, suite.compare)
    parts += ["## Values", _values(experiments), "## Origin", _origin(experiments)]
    if notes:
        parts += ["## Notes", notes]
    return "\n\n".join(parts) + "\n"


def _label_rows(experiment: Experiment) -> Experiment:
    """Return an experiment whose rows have the labels of the suite, which names their folders."""
    lines = []
    for line in experiment.lines:
        label = line.records[0].place.rpartition(": ")[2].partition("/")[0]
        lines.append(replace(line, label=label))
    return replace(experiment, lines=tuple(lines))


def _notes(name: str, results: Path) -> str:
    file = results / SUITES / f"{name}.notes.md"
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if len(text.splitlines()) > MAX_NOTES:
        raise FczooError(f"{file} has more than {MAX_NOTES} lines; shorten it")
    return text


def _heading(experiment: Experiment) -> str:
    return f"{experiment.settings['dataset']}, {experiment.about.partition['spec']}"


def _table(experiment: Experiment, rows: Mapping[str, SuiteRow]) -> str:
    """Return the rows by accuracy, with the 95 % interval of A_N where there are several seeds."""
    a_n = COLUMNS["A_N"]
    ranked = sorted(
        ((entry.mean if (entry := entry_of(x, a_n)) else -1.0, x) for x in experiment.lines),
        key=lambda pair: -pair[0],
    )
    body = []
    for _, line in ranked:
        entry = entry_of(line, a_n)
        bounds = interval(list(entry.by_seed.values())) if entry else None
        cells = []
        for metric in METRICS:
            column, value = COLUMNS[metric], entry_of(line, COLUMNS[metric])
            cells.append(column.show(value.mean) if value else "–")
        between = f"{bounds[0]:.1f} to {bounds[1]:.1f}" if bounds else "–"
        role = rows[line.label].role if line.label in rows else "not in the suite"
        body.append([line.label, role, cells[0], between, *cells[1:], str(len(line.records))])
    head = ["row", "role", "A_N", "95 % interval", *METRICS[1:], "seeds"]
    align = ["left", "left", *["right"] * (len(head) - 2)]
    return tabulate(body, head, tablefmt="github", disable_numparse=True, colalign=align)


def _differences(experiment: Experiment, compare: Sequence[tuple[str, str]]) -> list[str]:
    """Return one sentence per comparison; p values are corrected for their number (Holm)."""
    entries = {line.label: entry_of(line, COLUMNS["A_N"]) for line in experiment.lines}
    chosen = [
        (a, b, first, second)
        for a, b in compare
        if (first := entries.get(a)) and (second := entries.get(b))
    ]
    tested = {i: p for i, (_, _, x, y) in enumerate(chosen) if (p := p_value(x, y)) is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    sentences = []
    for i, (a, b, first, second) in enumerate(chosen):
        difference = first.mean - second.mean
        higher, lower = (a, b) if difference >= 0 else (b, a)
        points = f"{abs(difference):.1f} points"
        p = corrected.get(i)
        if p is None:
            sentences.append(f"- {higher} is {points} above {lower}; this was not tested.")
        elif p < LEVEL:
            sentences.append(
                f"- {higher} is significantly better than {lower}: {points}, p = {p:.2g}."
            )
        else:
            sentences.append(f"- {a} and {b} do not differ significantly: {points}, p = {p:.2g}.")
    if not sentences:
        return []
    count = plural(len(tested), "comparison")
    about = f"Paired t tests of A_N over the seeds, p values corrected for {count} (Holm):"
    return [about, "\n".join(sentences)]


def _values(experiments: Sequence[Experiment]) -> str:
    """Return the options of each row that differ from its defaults, with the effort of a search."""
    rows = []
    for experiment in experiments:
        for line in experiment.lines:
            search = line.records[0].search
            effort = (
                f"{search['trials']} trials, {search['tasks']} tasks" if search else "no search"
            )
            rows.append([line.label, _heading(experiment), effort, _changed_options(line)])
    head = ["row", "setting", "search", "values other than the method's own"]
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def _changed_options(line: Line) -> str:
    config = recorded_config(line.records[0])
    if config.method not in METHODS.names():
        return "unknown, as the method is not installed"
    changed = config.changed_options("--set", "--tuned")
    short = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in changed.items()}
    return ", ".join(f"{k}={option_word(v)}" for k, v in short.items()) or "–"


def _origin(experiments: Sequence[Experiment]) -> str:
    """Return one line per hash of the code: version, processor, and the rows that it made."""
    labels_by_origin: dict[tuple[str, ...], list[str]] = {}
    for experiment in experiments:
        for line in experiment.lines:
            for record in line.records:
                result = record.result
                assert result is not None
                key = (
                    result.versions.get("code", "unknown")[:8],
                    f"fczoo {result.versions.get('fczoo', '?')}",
                    f"torch {result.versions.get('torch', '?')}",
                    str(record.about.hardware.get("cpu", "unknown processor")),
                )
                labels_by_origin.setdefault(key, []).append(line.label)
    rows = [[*key, ", ".join(dict.fromkeys(labels))] for key, labels in labels_by_origin.items()]
    return tabulate(rows, ["code", "version", "torch", "processor", "rows"], tablefmt="github")
