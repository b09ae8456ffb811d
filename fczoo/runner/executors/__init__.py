"""Parallel execution of a sweep: on this machine's cores, on a Slurm cluster, or on a Ray cluster.

Results are the same as in sequential execution. If a worker dies, only its own run is affected: it
restarts from its last saved round, and fails if its worker dies again. Each executor is a module of
``fczoo.runner.executors``, see ``MODULES``, with ``check(execution)`` and
``workers(count, execution, out)``.
"""

import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from signal import SIGTERM
from types import ModuleType
from typing import Literal, Protocol

from fczoo.core.errors import (
    FczooError,
    InterruptedCommandError,
    lacks_memory,
    options_in_messages,
)
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.device import pick_device
from fczoo.federation.environment import code_of, versions
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import FAILURE, read_bench_file
from fczoo.runner.configs import ExecutionConfig, RunSpec
from fczoo.runner.execute import error_text, execute_run, record_failure
from fczoo.runner.progress import print_progress
from fczoo.runner.run_control import CLUSTER, Interrupts, lock_folder
from fczoo.runner.warnings import gather_warnings

MAX_ATTEMPTS = 2  # attempts at a run whose worker dies
POLL_SECONDS = 0.5  # seconds between two checks for a signal to stop


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run in a worker, as plain values, since some exceptions cannot be sent back."""

    status: Literal["done", "failed", "stopped", "died"]
    error: str = ""


class Worker(Protocol):
    """Worker outside this process, which executes one run at a time."""

    def begin(self, run: RunSpec, execution: ExecutionConfig) -> "Future[Outcome]":
        """Start a run in this worker."""

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """Return the outcome of a finished run; then the worker is ready for the next one."""

    def stop(self) -> None:
        """Stop the run after its current round; a run that waits in a queue need not start."""

    def close(self, force: bool) -> None:
        """Release the worker; with ``force`` interrupt its run."""


MODULES = {"cores": "local", "slurm": "slurm", "ray": "ray"}
"""Modules by name of the executor, as in ``--executor``."""


def check_executor(execution: ExecutionConfig) -> None:
    """Raise FczooError if the executor is unavailable here, or does not have an option."""
    _module(execution).check(execution)


def _module(execution: ExecutionConfig) -> ModuleType:
    return import_module(f"fczoo.runner.executors.{MODULES[execution.executor]}")


def run_in_parallel(
    runs: Sequence[RunSpec],
    execution: ExecutionConfig,
    out: Path,
    on_end: Callable[[RunSpec], None],
    on_wait: Callable[[Iterable[RunSpec]], None],
) -> None:
    """Execute runs in parallel, ``execution.jobs`` at a time.

    ``on_end`` is called after each run, ``on_wait`` at short intervals with the active runs.

    Raises FczooError for an unavailable executor and, unless failures are skipped, for a failed
    run, once the other workers have saved their round; InterruptedCommandError after SIGINT or
    SIGTERM.
    """
    workers: Sequence[Worker] = _module(execution).workers(
        min(execution.jobs, len(runs)), execution, out
    )
    queue = _RunQueue(deque(runs), execution, workers)
    _run(queue, out, on_end, on_wait)
    if queue.failure:
        raise queue.failure


def _run(
    queue: "_RunQueue",
    out: Path,
    on_end: Callable[[RunSpec], None],
    on_wait: Callable[[Iterable[RunSpec]], None],
) -> None:
    with Interrupts(out) as interrupts:
        try:
            while queue.active_runs or (
                queue.waiting_runs and not queue.failure and not interrupts.signal_number
            ):
                if queue.failure or interrupts.signal_number:
                    for worker in queue.workers:
                        worker.stop()
                else:
                    queue.begin()
                on_wait([run for _, run in queue.active_runs.values()])
                for run in queue.pop_ended():
                    on_end(run)
        finally:
            for worker in queue.workers:
                worker.close(force=bool(queue.active_runs))
        interrupts.check_interrupt()


@dataclass
class _RunQueue:
    """Waiting runs, and active runs with their workers."""

    waiting_runs: deque[RunSpec]
    execution: ExecutionConfig
    workers: Sequence[Worker]
    active_runs: "dict[Future[Outcome], tuple[Worker, RunSpec]]" = field(default_factory=dict)
    deaths: Counter[RunSpec] = field(default_factory=Counter)
    failure: FczooError | None = None

    def begin(self) -> None:
        """Start a run on every idle worker."""
        busy = [worker for worker, _ in self.active_runs.values()]
        for worker in self.workers:
            if worker not in busy and self.waiting_runs:
                run = self.waiting_runs.popleft()
                self.active_runs[worker.begin(run, self.execution)] = worker, run

    def pop_ended(self) -> Iterator[RunSpec]:
        """Yield the runs that have ended, after a short wait.

        A run whose worker died returns to the queue, unless it has no attempt left.
        """
        futures, _ = wait(self.active_runs, POLL_SECONDS, FIRST_COMPLETED)
        for future in futures:
            worker, run = self.active_runs.pop(future)
            outcome = worker.outcome(future)
            if outcome.status == "died":
                self.deaths[run] += 1
                if self.deaths[run] < MAX_ATTEMPTS:
                    print_progress(f"{run.numbered_label}: its process died; restarting the run")
                    self.waiting_runs.appendleft(run)
                    continue
                outcome = Outcome(
                    "failed", f"its process died {MAX_ATTEMPTS} times; {outcome.error}"
                )
                record_failure(run, outcome.error)
            if outcome.status == "failed":
                if not (run.folder_of_run / FAILURE).exists():  # it failed before it started
                    record_failure(run, outcome.error)
                    print_progress(f"{run.numbered_label}: failed, {outcome.error}")
                if not self.execution.skip_failed:
                    self.failure = self.failure or FczooError(f"{run.label}: {outcome.error}")
            yield run


_benchmarks: dict[Settings, Benchmark] = {}  # in a worker: the benchmark of its latest run


def open_benchmark(run: RunSpec) -> Benchmark:
    """Return the run's benchmark in a worker: the latest one, from shared files, or opened."""
    settings = run.config.settings
    if settings not in _benchmarks:
        _benchmarks.clear()
        _benchmarks[settings] = run.shared.open() if run.shared else Benchmark.open(settings)
    return _benchmarks[settings]


@options_in_messages()
def work(run: RunSpec, execution: ExecutionConfig, check_interrupt: Callable[[], None]) -> Outcome:
    """Execute one run in a worker; return the outcome, also of a failure."""
    try:
        # the lock also excludes a new command if this one's parent has died
        with gather_warnings(), lock_folder(run.folder_of_run):
            execute_run(run, open_benchmark(run), execution, check_interrupt)
    except InterruptedCommandError:
        return Outcome("stopped")
    except Exception as error:
        if _is_interrupted(check_interrupt):  # shared files vanish when the command is killed
            return Outcome("stopped")
        if not isinstance(error, FczooError) and not lacks_memory(error):
            traceback.print_exc()
        return Outcome("failed", error_text(error))
    return Outcome("done")


def _is_interrupted(check_interrupt: Callable[[], None]) -> bool:
    try:
        check_interrupt()
    except InterruptedCommandError:
        return True
    return False


@dataclass(frozen=True)
class Command:
    """The command that started the runs, as seen by other machines through shared files.

    Once the file ``stop`` exists, runs end after their current round.
    """

    out: Path  # run folder
    base_folder: Path  # working folder of the command, for relative file names

    @property
    def stop_file(self) -> Path:
        """Return the file that stops every run."""
        return self.out / CLUSTER / "stop"

    def check_interrupt(self) -> None:
        """Raise InterruptedCommandError if the stop file exists."""
        if self.stop_file.exists():
            raise InterruptedCommandError("stopped on request", SIGTERM)


def prepare_command(out: Path) -> Command:
    """Return this command with its run folder; remove an earlier command's stop file."""
    command = Command(out.resolve(), Path.cwd())
    command.stop_file.parent.mkdir(parents=True, exist_ok=True)
    command.stop_file.unlink(missing_ok=True)
    return command


def work_on_node(run: RunSpec, execution: ExecutionConfig, command: Command) -> Outcome:
    """Execute one run on another machine, if versions and source match the command's."""
    import torch

    os.chdir(command.base_folder)
    torch.set_num_threads(execution.threads)
    try:
        check_node(run)
    except FczooError as error:
        return Outcome("failed", error_text(error))
    return work(run, execution, command.check_interrupt)


def check_node(run: RunSpec) -> None:
    """Raise FczooError if versions, device or source differ from those in ``bench.json``.

    Otherwise results of this machine could differ from the other rows of the table.
    """
    bench_file = read_bench_file(run.folder)
    differences = [
        f"{name} is {version} here, {bench_file.versions[name]} where the command was started"
        for name, version in versions().items()
        if bench_file.versions.get(name, version) != version
    ]
    config = run.config
    device = str(pick_device(config.settings.device))
    if device != bench_file.device:
        differences.append(
            f"the runs need device {bench_file.device}, this node would use {device} (set --device)"
        )
    code = code_of(config.settings, config.create_method())
    differences += [
        f"{name} differs"
        for name, sha256 in code.items()
        if bench_file.code.get(name, sha256) != sha256
    ]
    if differences:
        raise FczooError(
            f"this node cannot take part: {'; '.join(differences[:3])}; give all nodes the same "
            "environment"
        )
