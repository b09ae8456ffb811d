"""Execution of one run of a sweep, which writes the run's files."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exc
from typing import Any

from fczoo.core.errors import (
    OUT_OF_MEMORY,
    FczooError,
    InterruptedCommandError,
    lacks_memory,
)
from fczoo.core.files import encode_json, name_file_in_errors, write_json
from fczoo.core.method import Method
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.callbacks import Callback, CallbackList
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.device import deterministic_operations
from fczoo.federation.diagnostics import Probe
from fczoo.federation.remote import Transport
from fczoo.federation.result import write_result
from fczoo.federation.run import FederatedRun
from fczoo.models.storage import keep_model
from fczoo.reports.run_folder import (
    FAILURE,
    LOG,
    RESULT,
    ROUNDS,
    WARNINGS,
    BenchFile,
    read_bench_file,
    write_bench_file,
)
from fczoo.runner.configs import ExecutionConfig, RunSpec, is_finished
from fczoo.runner.progress import Progress, ProgressCallback, log_to_file, print_progress
from fczoo.runner.tracked_files import send_run
from fczoo.runner.trackers import LOGGERS
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
                f"{self.folder} to restart this run"
            )
        self.log.truncate(self.log.tell())  # drop logged rounds that the checkpoint does not have

    def round(self, record: dict[str, Any]) -> None:
        with name_file_in_errors(Path(self.log.name)):
            self.log.write(encode_json(record).encode() + b"\n")
            self.log.flush()
            os.fsync(self.log.fileno())


def execute_run(
    run: RunSpec,
    bench: Benchmark,
    execution: ExecutionConfig,
    check_interrupt: Callable[[], None],
    progress: Progress | None = None,
    transport: Transport | None = None,
) -> bool:
    """Execute a run; return whether an earlier command had finished it.

    A finished run is skipped; an interrupted one resumes after its last saved round.

    ``check_interrupt`` is called after every saved round and may raise InterruptedCommandError.
    Any other error is written to ``failed.json`` and raised, or with ``execution.skip_failed`` only
    reported. ``progress`` is given for sequential sweeps, ``transport`` for clients on other
    machines.
    """
    with log_to_file(run.folder / LOG):
        if skip_finished(run):
            return True
        (run.folder_of_run / FAILURE).unlink(missing_ok=True)
        try:
            with WarningRecorder(run.folder_of_run / WARNINGS):
                _run(run, bench, execution, check_interrupt, progress, transport)
        except InterruptedCommandError:
            raise
        except Exception as error:
            record_failure(
                run, error_text(error), "" if isinstance(error, FczooError) else format_exc()
            )
            if not execution.skip_failed:
                raise
            print_progress(f"{run.numbered_label}: failed, {error_text(error)}")
    return False


def skip_finished(run: RunSpec) -> bool:
    """Report a run that an earlier command has finished; return whether it is finished."""
    finished = is_finished(run)
    if finished:
        Checkpoint(run.checkpoint).remove()
        print_progress(f"{run.numbered_label}: already finished, skipped")
    return finished


def _run(
    run: RunSpec,
    bench: Benchmark,
    execution: ExecutionConfig,
    check_interrupt: Callable[[], None],
    progress: Progress | None,
    transport: Transport | None,
) -> None:
    checkpoint, portable = Checkpoint(run.checkpoint, check_interrupt), bench.settings.portable()
    folder = run.folder_of_run
    with ExitStack() as stack:
        files_folder = (
            Path(stack.enter_context(TemporaryDirectory())) if execution.loggers else Path()
        )
        trackers = [
            stack.enter_context(LOGGERS[name](folder, portable)) for name in execution.loggers
        ]
        stack.enter_context(deterministic_operations(bench.settings.deterministic))
        rounds = stack.enter_context(RoundWriter(folder))
        probe = Probe(folder) if execution.diagnostics else None
        callback = CallbackList([rounds, ProgressCallback(run, progress), *trackers])
        method, seed = run.config.create_method(), run.config.seed
        federated_run = FederatedRun(bench, method, seed, callback, checkpoint, probe, transport)
        for _ in federated_run:
            try:  # the model first: a finished result implies its model
                keep_model(folder, federated_run, execution.keep_model, execution.keep_server_state)
            except InterruptedCommandError:
                raise
            except Exception:
                write_result(folder / RESULT, federated_run.result)
                raise
            write_result(folder / RESULT, federated_run.result)
        if trackers:
            send_run(run, trackers, files_folder)
    checkpoint.remove()


def error_text(error: Exception) -> str:
    """Format an error as one line; errors of other packages start with their type."""
    if lacks_memory(error):
        return OUT_OF_MEMORY
    return str(error) if isinstance(error, FczooError) else f"{type(error).__name__}: {error}"


def record_failure(run: RunSpec, error: str, traceback: str = "") -> None:
    """Write ``failed.json`` to the run's folder; tables list the failure, the next command retries.

    ``traceback`` helps authors of methods to find errors in their code.
    """
    write_json(
        run.folder_of_run / FAILURE,
        {"error": error, **({"traceback": traceback} if traceback else {})},
    )


def add_warnings(folder: Path, warnings: Collection[LocatedWarning]) -> None:
    """Add warnings that were printed before the folder existed to its files."""
    WarningRecorder(folder / WARNINGS).add(*warnings)
    with log_to_file(folder / LOG) as handler:
        for line in warning_lines(warnings):
            handler.handle(log.makeRecord(log.name, logging.WARNING, "", 0, line, (), None))
    describe_warnings(folder)


def describe_warnings(folder: Path) -> None:
    """Write the warnings of a run folder and of its runs to the folder's ``bench.json``."""
    bench_file = read_bench_file(folder)
    lines = _lines(folder, bench_file)
    if lines != bench_file.warnings:
        write_bench_file(folder, {**bench_file.plain(), "warnings": lines})


def _lines(folder: Path, bench_file: BenchFile) -> list[str]:
    general = read_warnings(folder / WARNINGS)
    lines = warning_lines(general)
    texts = {warning.text for warning in general}
    for method in bench_file.methods:
        run_warnings = [
            LocatedWarning(text, ", ".join(filter(None, (f"seed {seed}", location))))
            for seed in bench_file.seeds
            for text, location in read_warnings(folder / method / f"seed{seed}" / WARNINGS)
            if text not in texts
        ]
        lines += [
            f"{method}: {line.removeprefix(f'{method}: ')}" for line in warning_lines(run_warnings)
        ]
    return lines
