"""Execution of suites: the searches and the runs of their rows, side by side."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fczoo.core.errors import InterruptedCommandError
from fczoo.core.files import content_sha256, through_json
from fczoo.reports.run_config import RunConfig, configure_run
from fczoo.reports.run_folder import ABOUT, FAILURE, Runs
from fczoo.reports.runs import read_runs
from fczoo.reports.suites import Suite, SuiteCell, code_digest, enter_runs, split_by_seed
from fczoo.reports.text_format import option_word
from fczoo.runner.configs import ExecutionConfig, RunSpec, folder_name
from fczoo.runner.progress import say
from fczoo.runner.resume import only_process
from fczoo.runner.sweep import run_sweep
from fczoo.runner.tune import StopWithCommand, search_workers, tune
from fczoo.runner.tuned_file import TUNED_FILE, Effort, read_tuned_values

SEARCH = "search"  # folder of the searches
RUNS = "runs"  # folder of the run folders


def folder_of(cell: SuiteCell, suite: Suite) -> str:
    """Return the name of a cell's folders: other code or settings have other folders.

    Args:
        cell: The cell.
        suite: Its suite.
    """
    config = cell.configs[0]
    content = {
        "code": code_digest(config),
        "settings": through_json(config.settings.portable()),
        "set": {name: option_word(value) for name, value in cell.row.set.items()},
        "search": [cell.row.searched(suite.trials), suite.trials, suite.first_tasks],
        "held out": suite.held_out,
    }
    return f"{folder_name(cell.name)}-{content_sha256(content)[:8]}"


def run_suite(
    suite: Suite,
    cells: Sequence[SuiteCell],
    folder: Path,
    archive: Path,
    execution: ExecutionConfig,
) -> int:
    """Search and run the pending seeds of some cells, and enter finished runs in the archive.

    A command that was interrupted resumes: searches after their last trial, runs after their last
    round. The archive is written at the end, also of a command that stops.

    Args:
        suite: The suite.
        cells: Cells to run.
        folder: Folder of the searches and runs.
        archive: CSV file of the suite.
        execution: Execution of the runs; ``jobs`` also counts the searches at the same time.

    Returns:
        Number of runs that failed.

    Raises:
        FczooError: A cell cannot run; the message names it.
        InterruptedCommandError: A signal stopped the command.
    """
    cells_by_folder = {folder_of(cell, suite): cell for cell in cells}
    try:
        with only_process(folder):
            _remove_others(folder, cells_by_folder)
            try:
                _search(suite, cells_by_folder, folder / SEARCH, execution.jobs)
                sweep: dict[Path, list[RunConfig]] = {}
                for name, cell in cells_by_folder.items():
                    for config in _tuned_runs(cell, folder / SEARCH / name):
                        sweep.setdefault(_place(name, config), []).append(config)
                return run_sweep(sweep, folder / RUNS, execution)[1]
            finally:
                _enter_finished(cells_by_folder, folder / RUNS, archive)
    except InterruptedCommandError as error:
        raise InterruptedCommandError(
            "stopped on request; finished runs are entered, and the same command resumes",
            error.exit_code - 128,
        ) from None


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove searches and runs of other code or settings, and those that are entered."""
    for kind in (SEARCH, RUNS):
        for old in (folder / kind).glob("*"):
            if old.is_dir() and old.name not in names:
                shutil.rmtree(old)


def _search(suite: Suite, cells: Mapping[str, SuiteCell], folder: Path, jobs: int) -> None:
    """Search the values of all rows that have a space, ``jobs`` rows at the same time."""
    remaining = [
        (folder / name, cell)
        for name, cell in cells.items()
        if cell.row.searched(suite.trials) and not (folder / name / TUNED_FILE).exists()
    ]
    if not remaining:
        return
    effort = Effort(trials=suite.trials, tasks=suite.first_tasks, held_out=suite.held_out, seed=0)
    search = partial(_search_cell, effort=effort, command=os.getpid())
    with search_workers(jobs) as workers:
        for number, name in enumerate(workers.map(search, remaining), 1):
            say(f"search {number} of {len(remaining)} ended: {name}")


def _search_cell(place: tuple[Path, SuiteCell], effort: Effort, command: int) -> str:
    """Search the values of one cell in a worker; return its name."""
    out, cell = place
    settings = replace(cell.configs[0].settings, vary=("training",))
    given = {cell.row.method: cell.row.set}
    tune([cell.row.method], settings, effort, out, given=given, callback=StopWithCommand(command))
    return cell.name


def _tuned_runs(cell: SuiteCell, search: Path) -> Iterator[RunConfig]:
    """Yield the pending runs of a cell with the values that its search found."""
    tuned = read_tuned_values(search / TUNED_FILE) if (search / TUNED_FILE).exists() else None
    method, given = cell.row.method, {cell.row.method: cell.row.set}
    for config in cell.configs:
        if config.seed not in cell.pending:
            continue
        if tuned is None:
            yield config
            continue
        options = {**tuned.values[method], **cell.row.set}
        # the search has this cell's settings but for the seeds, of which it has its own
        record = tuned.record([method], given, config.settings)
        yield configure_run(method, config.settings, options, config.seed, record)


def _place(name: str, config: RunConfig) -> Path:
    """Return the run folder of a run: one per seed if seeds vary more than training."""
    return Path(name) if config.settings.vary == ("training",) else Path(name, f"seed{config.seed}")


def _enter_finished(cells: Mapping[str, SuiteCell], folder: Path, archive: Path) -> None:
    """Enter the finished runs of some cells in the archive."""
    found: dict[str, Runs] = {}
    for name, cell in cells.items():
        if list((folder / name).glob(f"**/{ABOUT}")):
            found |= split_by_seed(cell, read_runs([folder / name]))
    if found:
        enter_runs(archive, found)


def failed_seeds(cell: SuiteCell, suite: Suite, folder: Path) -> set[int]:
    """Return the seeds whose last run failed.

    Args:
        cell: The cell.
        suite: Its suite.
        folder: Folder of the searches and runs.
    """
    name = folder_of(cell, suite)
    return {
        config.seed
        for config in cell.configs
        if RunSpec(config, folder / RUNS / _place(name, config))
        .folder_of_run.joinpath(FAILURE)
        .exists()
    }
