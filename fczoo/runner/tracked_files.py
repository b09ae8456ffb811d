"""Files that trackers get at the end: tables, figures and models."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import encode_json
from fczoo.federation.model_record import CARD, RECORD, TENSORS
from fczoo.reports.drawing import import_matplotlib, save_figures, write_figures
from fczoo.reports.run_folder import RESULT, ROUNDS
from fczoo.reports.runs import Experiment, experiments_of, read_experiments, read_runs
from fczoo.reports.sweeps import find_sweeps, sweep_figures, sweep_report
from fczoo.reports.table_formats import as_json, sections, to_csv
from fczoo.reports.tables import GROUPS
from fczoo.runner.configs import RunSpec, is_finished
from fczoo.runner.trackers import LOGGERS, Logger

log = logging.getLogger(__name__)

Files = dict[str, list[Path]]
"""Files by kind: ``tables``, ``figures``, ``results`` and ``model``."""
MODEL_FILES = (TENSORS, RECORD, CARD)  # other tensors of the server's state are never sent


def send_run(run: RunSpec, trackers: Sequence[Logger], folder: Path) -> None:
    """Send table, figures, result and stored model of a finished run to its trackers.

    Args:
        run: The run; its files are complete.
        trackers: Its open trackers.
        folder: Empty folder for files, which must exist until the trackers are closed.
    """
    if not is_finished(run):
        return
    try:
        files = _run_files(run, folder)
    except Exception as error:  # the run is finished, and its own files are written
        log.warning("no files of %s are sent to trackers: %s", run.label, first_line(error))
        return
    for tracker in trackers:
        tracker.finish(files)


def send_report(folders: Sequence[Path], out: Path, names: Sequence[str]) -> None:
    """Send the tables and figures of all runs of a command, as a separate run of each tracker.

    Nothing is sent for a single run, which has them already. An error is logged as a warning.

    Args:
        folders: Run folders of the command.
        out: Folder of the command, which names the report.
        names: Names of the trackers.
    """
    try:
        _send_report(folders, out, names)
    except Exception as error:  # the runs are finished, and their own files are written
        log.warning("no report of %s is sent to trackers: %s", out, first_line(error))


def _send_report(folders: Sequence[Path], out: Path, names: Sequence[str]) -> None:
    experiments = read_experiments(folders)
    if sum(len(line.records) for e in experiments for line in e.lines) < 2:
        return
    with ExitStack() as stack:
        files_folder = Path(stack.enter_context(TemporaryDirectory()))
        files = _report_files(experiments, files_folder)
        for name in names:
            settings = experiments[0].bench_file.settings
            tracker = stack.enter_context(LOGGERS[name](folders[0], settings))
            tracker.start_report(f"report of {out.name}")
            tracker.finish(files)


def _run_files(run: RunSpec, folder: Path) -> Files:
    (runs,) = read_runs([run.folder])
    records = [
        record
        for record in runs.records
        if (record.method, record.seed) == (run.config.method, run.config.seed)
    ]
    (experiment,) = experiments_of([replace(runs, records=tuple(records))], str(run.folder_of_run))
    run_folder = run.folder_of_run
    stored = {
        "results": [run_folder / name for name in (RESULT, ROUNDS)],
        "model": [run_folder / name for name in MODEL_FILES if (run_folder / RECORD).is_file()],
    }
    files = _report_files([experiment], folder)
    return files | {kind: paths for kind, paths in stored.items() if paths}


def _report_files(experiments: Sequence[Experiment], folder: Path) -> Files:
    """Write tables and figures; without matplotlib only tables."""
    texts = {
        "tables.md": sections(experiments, "markdown", GROUPS),
        "tables.csv": to_csv(experiments),
        "tables.json": encode_json([as_json(e) for e in experiments], indent=1),
    }
    try:
        sweeps = find_sweeps(experiments)
    except FczooError:  # nothing was swept
        sweeps = []
    if sweeps:
        texts["sweeps.md"] = sweep_report(sweeps, "markdown")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    tables = [folder / name for name in texts]
    try:
        import_matplotlib()
    except FczooError:
        log.warning(
            "no figures are sent to trackers: matplotlib is not installed; run pip install "
            "'fczoo[plot]'"
        )
        return {"tables": tables}
    figures: list[Path] = []
    for number, experiment in enumerate(experiments, 1):
        figures_folder = folder / f"figures{number}"
        figures += _number_files(
            write_figures(experiment, figures_folder), number, len(experiments)
        )
    if sweeps:
        figures += save_figures(sweep_figures(sweeps), folder)
    return {"tables": tables, "figures": figures}


def _number_files(paths: Sequence[Path], number: int, count: int) -> list[Path]:
    """Rename files with the experiment's number as prefix, if there are several experiments."""
    if count == 1:
        return list(paths)
    return [path.rename(path.with_name(f"{number}-{path.name}")) for path in paths]
