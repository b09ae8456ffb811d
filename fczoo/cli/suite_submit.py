"""Option ``fczoo submit --suite``: check runs of a folder and enter them as rows of a suite."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from fczoo.cli.suite import cells_of
from fczoo.core.files import write_safely
from fczoo.reports.run_folder import RunRecord, Runs
from fczoo.reports.runs import read_runs
from fczoo.reports.submission import submit
from fczoo.reports.suites import (
    SUITES,
    Suite,
    SuiteCell,
    SuiteRow,
    archived_runs,
    code_digest,
    enter_runs,
    read_suite,
    state_of,
)

ADVICE = "run it with the suite's settings, seeds and search, and this version of fczoo"


@dataclass
class _Entries:
    """Runs that match a suite, by name in its archive, with faults and new rows."""

    runs_by_name: dict[str, Runs] = field(default_factory=dict)
    cells: dict[str, SuiteCell] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    new_methods: dict[str, None] = field(default_factory=dict)


def submit_to_suite(
    folder: Path, name: str, results: Path, enter: bool = True
) -> tuple[int, list[str]]:
    """Check the runs of a folder and enter them as rows of a suite.

    A new method becomes a row of the suite, with searched options. The runs of a row must have the
    suite's settings, options, search and code, and all its seeds.

    Args:
        folder: Run folder, or folder that contains run folders.
        name: Name of the suite.
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
        write: Whether to write; False: only check.

    Returns:
        Number of runs, and one line per fault; if there is a fault, no run is entered.

    Raises:
        FczooError: No run is found, or a file is damaged.
    """
    path, archive = results / SUITES / f"{name}.toml", results / f"{name}.csv"
    suite = read_suite(path)
    count, faults = submit(folder, archive, write=False)
    entries = _Entries(faults=faults)
    for runs in read_runs([folder]):
        for record in runs.records:
            if record.result is not None:
                _add(entries, suite, path, runs, record)
    entries.faults += _missing_seeds(entries, archive)
    if entries.faults or not enter:
        return count, entries.faults
    if entries.new_methods:
        rows = "".join(f'\n[[rows]]\nmethod = "{method}"\n' for method in entries.new_methods)
        write_safely(path, f"{path.read_text(encoding='utf-8').rstrip()}\n{rows}".encode())
    enter_runs(archive, entries.runs_by_name)
    return count, []


def _add(entries: _Entries, suite: Suite, path: Path, runs: Runs, record: RunRecord) -> None:
    """Add a run under the name of its row and setting, or the reason why it matches none."""
    rows = [row for row in suite.rows if row.method == record.method]
    is_new = not rows
    reasons: list[str] = []
    for row in rows or [SuiteRow(record.method)]:
        for cell in cells_of(suite, row, {}, str(path)):
            for config in cell.configs:
                if config.seed != record.seed:
                    continue
                state, reason = state_of(config, row, suite, record, code_digest(config))
                if state == "current":
                    name = cell.archive_name(record.seed)
                    entries.runs_by_name[name] = replace(runs, records=(record,))
                    entries.cells[cell.name] = cell
                    if is_new:
                        entries.new_methods[record.method] = None
                    return
                reasons.append(reason)
    part = reasons[0] if reasons else "seed"
    verb = "do" if part.endswith("s") else "does"
    problem = f"its {part} {verb} not match suite {path.stem}"
    entries.faults.append(f"{record.place}: {problem}; {ADVICE}")


def _missing_seeds(entries: _Entries, archive: Path) -> list[str]:
    """Return a fault for each row that lacks seeds of the suite."""
    names = {*entries.runs_by_name, *archived_runs(archive)}
    faults = []
    for cell in entries.cells.values():
        seeds = [c.seed for c in cell.configs if cell.archive_name(c.seed) not in names]
        if seeds:
            faults.append(f"{cell.name}: seed {seeds[0]} of the suite is missing; {ADVICE}")
    return faults
