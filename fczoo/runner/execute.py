"""Runs one cell of a grid and writes its files."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from traceback import format_exc
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, naming, write_json
from fczoo.core.method import Method
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.callbacks import Callback, CallbackList
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.device import reproducible
from fczoo.federation.diagnostics import Probe
from fczoo.federation.remote import Transport
from fczoo.federation.result import write_result
from fczoo.federation.run import FederatedRun
from fczoo.models.keep import keep_model
from fczoo.reports.run_folder import (
    FAILURE,
    LOG,
    RESULT,
    ROUNDS,
    WARNINGS,
    About,
    read_about,
    write_about,
)
from fczoo.runner.progress import Progress, ProgressCallback, log_to_file, say
from fczoo.runner.resume import InterruptedRunError
from fczoo.runner.run_spec import ExecutionConfig, RunSpec
from fczoo.runner.trackers import Logging
from fczoo.runner.warnings import LocatedWarning, WarningRecorder, read_warnings, warning_lines

log = logging.getLogger("fczoo")


class RoundWriter(Callback):
    """Callback that writes a run's ``rounds.jsonl``, one line per round."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = (folder / ROUNDS).open("a+b")

    def __enter__(self) -> "RoundWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.log.seek(0)
        if sum(1 for _ in zip(range(done), self.log, strict=False)) < done:
            raise FczooError(
                f"{self.log.name} lists fewer rounds than the checkpoint next to it; remove "
                f"{self.folder} "
                "to begin this run again"
            )
        self.log.truncate(self.log.tell())  # rounds that were logged but not saved are run again

    def round(self, record: dict[str, Any]) -> None:
        with naming(Path(self.log.name)):
            self.log.write(encode_json(record).encode() + b"\n")
            self.log.flush()
            os.fsync(self.log.fileno())


def run_cell(
    cell: RunSpec,
    bench: Benchmark,
    conduct: ExecutionConfig,
    obey: Callable[[], None],
    progress: Progress | None = None,
    elsewhere: Transport | None = None,
) -> None:
    """Run a cell.

    A finished run is kept; an interrupted one resumes after its last saved round.

    ``obey`` is called after every saved round and may raise Interrupted. Whatever else is raised
    is also in ``failed.json``; with ``conduct.skip_failed`` it is only reported. ``progress`` is
    that of a grid whose runs take turns, ``elsewhere`` where its clients act if not here.
    """
    with log_to_file(cell.folder / LOG):
        if skip_finished(cell):
            return
        (cell.folder_of_run / FAILURE).unlink(missing_ok=True)
        try:
            with WarningRecorder(cell.folder_of_run / WARNINGS):
                _run(cell, bench, conduct, obey, progress, elsewhere)
        except InterruptedRunError:
            raise
        except Exception as error:
            record_failure(
                cell, error_text(error), "" if isinstance(error, FczooError) else format_exc()
            )
            if not conduct.skip_failed:
                raise
            say(f"{cell.numbered_label}: failed, {error_text(error)}")


def skip_finished(cell: RunSpec) -> bool:
    """Return whether an earlier command has finished the run, and report it."""
    finished = cell.is_finished
    if finished:
        Checkpoint(cell.checkpoint).remove()
        say(f"{cell.numbered_label}: finished before, kept")
    return finished


def _run(
    cell: RunSpec,
    bench: Benchmark,
    conduct: ExecutionConfig,
    obey: Callable[[], None],
    progress: Progress | None,
    elsewhere: Transport | None,
) -> None:
    checkpoint, portable = Checkpoint(cell.checkpoint, obey), bench.settings.portable()
    with ExitStack() as stack:
        trackers = [
            stack.enter_context(Logging(name, cell.folder_of_run, portable))
            for name in conduct.loggers
        ]
        stack.enter_context(reproducible(bench.settings.deterministic))
        rounds = stack.enter_context(RoundWriter(cell.folder_of_run))
        probe = Probe(cell.folder_of_run) if conduct.diagnostics else None
        callback = CallbackList([rounds, ProgressCallback(cell, progress), *trackers])
        run = FederatedRun(bench, cell.method, cell.seed, callback, checkpoint, probe, elsewhere)
        for _ in run:  # the model first: a finished result says that all has been kept
            keep_model(cell.folder_of_run, run, conduct.keep_model, conduct.keep_server_state)
            write_result(cell.folder_of_run / RESULT, run.result)
    checkpoint.remove()


def error_text(error: Exception) -> str:
    """Format an error in one line; errors of other packages get their type."""
    return str(error) if isinstance(error, FczooError) else f"{type(error).__name__}: {error}"


def record_failure(cell: RunSpec, error: str, traceback: str = "") -> None:
    """Write ``failed.json`` to the run's folder; tables name it, and the next command tries again.

    With the traceback of an error that is none of ours: whoever writes a method looks for it.
    """
    write_json(
        cell.folder_of_run / FAILURE,
        {"error": error, **({"traceback": traceback} if traceback else {})},
    )


def add_warnings(folder: Path, warnings: Collection[LocatedWarning]) -> None:
    """Add warnings that were given before the folder was there; the terminal has them already."""
    WarningRecorder(folder / WARNINGS).add(*warnings)
    with log_to_file(folder / LOG) as handler:
        for line in warning_lines(warnings):
            handler.handle(log.makeRecord(log.name, logging.WARNING, "", 0, line, (), None))
    describe_warnings(folder)


def describe_warnings(folder: Path) -> None:
    """Write the warnings of a run folder and of all its runs to its ``bench.json``."""
    about = read_about(folder)
    lines = _lines(folder, about)
    if lines != about.warnings:
        write_about(folder, {**about.plain(), "warnings": lines})


def _lines(folder: Path, about: About) -> list[str]:
    general = read_warnings(folder / WARNINGS)
    lines = warning_lines(general)
    texts = {warning.text for warning in general}
    for method in about.methods:
        run_warnings = [
            LocatedWarning(text, ", ".join(filter(None, (f"seed {seed}", location))))
            for seed in about.seeds
            for text, location in read_warnings(folder / method / f"seed{seed}" / WARNINGS)
            if text not in texts
        ]
        lines += [
            f"{method}: {line.removeprefix(f'{method}: ')}" for line in warning_lines(run_warnings)
        ]
    return lines
