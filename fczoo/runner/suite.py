"""Execution of suites: search and run their rows, and enter each run in the archive as it ends."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fczoo.core.errors import FczooError, InterruptedCommandError
from fczoo.core.files import content_sha256, through_json, write_json
from fczoo.federation.callbacks import Callback
from fczoo.reports.run_config import RunConfig, configure_run
from fczoo.reports.run_folder import FAILURE, read_folder
from fczoo.reports.suites import Suite, SuiteCell, code_digest, enter_runs, split_by_seed
from fczoo.reports.text_format import option_word
from fczoo.runner.configs import ExecutionConfig, RunSpec, folder_name
from fczoo.runner.progress import print_progress
from fczoo.runner.run_control import lock_folder
from fczoo.runner.sweep import run_sweep
from fczoo.runner.tune import search_workers, tune, watch_command
from fczoo.runner.tuned_file import TUNED_FILE, Effort, TunedMethod, read_tuned, tuned_values_of

SEARCH = "search"  # folder of the searches
RUNS = "runs"  # folder of the run folders
DIGITS = 4  # significant digits of a trial's values and score in the archive


def cell_folder(cell: SuiteCell, suite: Suite) -> str:
    """Return the name of a cell's folders, which depends on its code and settings.

    Args:
        cell: The cell.
        suite: Its suite.
    """
    config = cell.configs[0]
    content = {
        "code": code_digest(config),
        "settings": through_json(config.settings.portable()),
        "set": {name: option_word(value) for name, value in cell.row.set.items()},
        "search": [cell.row.has_search(suite.trials), suite.trials, suite.first_tasks],
        "held out": suite.held_out,
    }
    return f"{_prefix(cell)}{content_sha256(content)[:8]}"


def _prefix(cell: SuiteCell) -> str:
    return f"{folder_name(cell.name)}-"


def run_suite(
    suite: Suite,
    cells: Sequence[SuiteCell],
    folder: Path,
    archive: Path,
    execution: ExecutionConfig,
) -> int:
    """Search and run the pending seeds of some cells; enter each run in the archive as it ends.

    Cells are processed in groups, with one job a single cell at a time: first the searches, then
    the runs. After an interruption the same command resumes: searches after their last trial, runs
    after their last round.

    Args:
        suite: The suite.
        cells: Cells to run.
        folder: Folder of the searches and runs.
        archive: CSV file of the suite.
        execution: Execution of the runs; ``jobs`` is also the number of parallel searches.

    Returns:
        Number of runs that failed.

    Raises:
        FczooError: A cell cannot run; the message names it.
        InterruptedCommandError: A signal stopped the command.
    """
    jobs, failures = execution.jobs, 0
    size = 2 * jobs if jobs > 1 else 1  # more cells than workers, so that few workers idle
    try:
        with lock_folder(folder), _termination_as_interrupt():
            _remove_outdated(folder, cells, suite)
            for start in range(0, len(cells), size):
                group = {cell_folder(cell, suite): cell for cell in cells[start : start + size]}
                failures += _run_group(suite, group, folder, archive, execution)
    except (InterruptedCommandError, KeyboardInterrupt) as error:
        number = error.exit_code - 128 if isinstance(error, FczooError) else signal.SIGINT
        raise InterruptedCommandError(
            "stopped on request; finished runs are archived, and the same command resumes", number
        ) from None
    return failures


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on SIGINT; runs have their own handlers."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


def _remove_outdated(folder: Path, cells: Sequence[SuiteCell], suite: Suite) -> None:
    """Remove searches and runs of some cells that have other code or settings."""
    names = {cell_folder(cell, suite) for cell in cells}
    prefixes = {_prefix(cell) for cell in cells}
    for kind in (SEARCH, RUNS):
        for old in (folder / kind).glob("*"):
            if old.is_dir() and old.name[:-8] in prefixes and old.name not in names:
                shutil.rmtree(old)


def _run_group(
    suite: Suite,
    group: Mapping[str, SuiteCell],
    folder: Path,
    archive: Path,
    execution: ExecutionConfig,
) -> int:
    """Search and run some cells, given by folder name; return the number of failed runs."""
    errors = _search(suite, group, folder / SEARCH, execution.jobs)
    sweep: dict[Path, list[RunConfig]] = {}
    for name, cell in group.items():
        if name not in errors:
            for config in _tuned_runs(cell, folder / SEARCH / name):
                sweep.setdefault(_folder_of_run(name, config), []).append(config)
    failures = sum(len(group[name].pending_seeds) for name in errors)
    if sweep:
        enter = _archive_callback(group, folder / RUNS, archive)
        failures += run_sweep(sweep, folder / RUNS, execution, enter, allow_others=True)[1]
    return failures


def _archive_callback(
    group: Mapping[str, SuiteCell], folder: Path, archive: Path
) -> Callable[[RunSpec], None]:
    """Return a callback that enters the finished runs of a run's folder in the archive."""

    def enter(run: RunSpec) -> None:
        name = run.folder.relative_to(folder).parts[0]
        if runs := split_by_seed(group[name], [read_folder(run.folder, name)]):
            enter_runs(archive, runs)

    return enter


def _search(suite: Suite, cells: Mapping[str, SuiteCell], folder: Path, jobs: int) -> list[str]:
    """Run the searches of cells that need one; return the folder names of failed searches."""
    remaining = [
        (folder / name, cell)
        for name, cell in cells.items()
        if cell.row.has_search(suite.trials)
        and cell.archived_run is None
        and not (folder / name / TUNED_FILE).exists()
    ]
    if not remaining:
        return []
    effort = Effort(trials=suite.trials, tasks=suite.first_tasks, held_out=suite.held_out, seed=0)
    if jobs == 1:
        errors = [_search_cell(pair, effort, Callback()) for pair in remaining]
    else:
        search = partial(_search_cell, effort=effort, callback=watch_command())
        with search_workers(jobs) as workers:
            errors = list(workers.map(search, remaining))
    failed = []
    for (place, cell), error in zip(remaining, errors, strict=True):
        if error:
            print_progress(f"search of {cell.name}: failed, {error}")
            failed.append(place.name)
    return failed


def _search_cell(place: tuple[Path, SuiteCell], effort: Effort, callback: Callback) -> str:
    """Search the values of one cell; return the error, or "" on success.

    The error is also written to the search's folder.
    """
    out, cell = place
    settings = replace(cell.configs[0].settings, vary=("training",))
    fixed_options = {cell.row.method: cell.row.set}
    (out / FAILURE).unlink(missing_ok=True)
    try:
        tune(
            [cell.row.method], settings, effort, out, fixed_options=fixed_options, callback=callback
        )
    except InterruptedCommandError:
        raise
    except FczooError as error:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / FAILURE, {"error": str(error)})
        return str(error)
    return ""


def _tuned_runs(cell: SuiteCell, search: Path) -> Iterator[RunConfig]:
    """Yield the pending runs of a cell with the values of its search, this one or an earlier."""
    options, record = _searched_values(cell, search)
    for config in cell.configs:
        if config.seed in cell.pending_seeds:
            yield (
                configure_run(cell.row.method, config.settings, options, config.seed, record)
                if record
                else config
            )


def _searched_values(cell: SuiteCell, search: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a cell's runs and the record of their search; empty without one."""
    method, settings = cell.row.method, cell.configs[0].settings
    if cell.archived_run is not None and cell.archived_run.result is not None:
        return dict(cell.archived_run.result.options), cell.archived_run.search
    if not (search / TUNED_FILE).exists():
        return {}, {}
    search_result = read_tuned(search / TUNED_FILE)
    tuned = tuned_values_of(search_result)
    # the search has this cell's settings, except for its own seeds
    record = tuned.record([method], {method: cell.row.set}, settings)
    trials = _trials_of(search_result.methods[method])
    return {**tuned.values[method], **cell.row.set}, {**record, **trials}


def _trials_of(tuned_method: TunedMethod) -> dict[str, Any]:
    """Return scores and values of a search's trials for the archive, rounded."""
    names = list(tuned_method.space)

    def round_value(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    rows = [
        [round_value(trial["score"]), *(round_value(trial["values"].get(name)) for name in names)]
        for trial in tuned_method.trials
    ]
    scores = {
        "score": round_value(tuned_method.score),
        "default_score": round_value(tuned_method.default_score),
    }
    return {**scores, "tried": {"options": names, "rows": rows}}


def _folder_of_run(name: str, config: RunConfig) -> Path:
    """Return a run's folder; there is one per seed if the seed varies more than training."""
    return Path(name) if config.settings.vary == ("training",) else Path(name, f"seed{config.seed}")


def failed_seeds(cell: SuiteCell, suite: Suite, folder: Path) -> set[int]:
    """Return the seeds whose last run failed; all seeds if the search failed.

    Args:
        cell: The cell.
        suite: Its suite.
        folder: Folder of the searches and runs.
    """
    name = cell_folder(cell, suite)
    if (folder / SEARCH / name / FAILURE).exists():
        return {config.seed for config in cell.configs}
    return {
        config.seed
        for config in cell.configs
        if RunSpec(config, folder / RUNS / _folder_of_run(name, config))
        .folder_of_run.joinpath(FAILURE)
        .exists()
    }
