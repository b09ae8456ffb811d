"""Runs of a grid side by side: on this machine's cores, on a Slurm cluster, or on a Ray cluster.

Sequential or parallel execution changes no number. A worker that dies takes its own run
with it and no other: the run is begun once more, from its last saved round, and has failed when its
worker dies again. Each executor is a module of ``fczoo.runner.executors``, see ``MODULES``, with
``check(conduct)`` and ``workers(count, conduct, out)``.
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

from fczoo.core.errors import FczooError, options_in_messages
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.device import pick_device
from fczoo.federation.environment import code_of, versions
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import FAILURE, read_about
from fczoo.runner.execute import error_text, record_failure, run_cell
from fczoo.runner.progress import say
from fczoo.runner.resume import CLUSTER, InterruptedRunError, Interrupts, only_process
from fczoo.runner.run_spec import ExecutionConfig, RunSpec
from fczoo.runner.warnings import gather_warnings

TRIES = 2  # of a run whose worker dies
WAIT = 0.5  # seconds between two looks at whether the user wants to stop


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run in a worker, as plain values, since some exceptions cannot be sent back."""

    end: Literal["done", "failed", "stopped", "died"]
    error: str = ""


class Worker(Protocol):
    """A place for one run at a time, somewhere else than in this process."""

    def begin(self, cell: RunSpec, conduct: ExecutionConfig) -> "Future[Outcome]":
        """Start a run in this worker."""

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """Return the outcome of a finished run; afterwards the worker can take the next one."""

    def stop(self) -> None:
        """Ask the run to end after the round it is in; one that has not begun need not begin."""

    def close(self, at_once: bool) -> None:
        """Stop the workers; with ``at_once`` interrupt their runs."""


MODULES = {"cores": "local", "slurm": "slurm", "ray": "ray"}
"""Names of executors, as options have them, and their modules."""


def check_executor(conduct: ExecutionConfig) -> None:
    """Raise FczooError for an executor that cannot be used here, or an option that it lacks."""
    _module(conduct).check(conduct)


def _module(conduct: ExecutionConfig) -> ModuleType:
    return import_module(f"fczoo.runner.executors.{MODULES[conduct.executor]}")


def run_side_by_side(
    cells: Sequence[RunSpec],
    conduct: ExecutionConfig,
    out: Path,
    done: Callable[[RunSpec], None],
    meanwhile: Callable[[Iterable[RunSpec]], None],
) -> None:
    """Run ``cells``, ``conduct.jobs`` of them at a time.

    ``done`` is called here after each, and ``meanwhile`` again and again with those that execute.

    Raises FczooError for an executor that cannot be used here, for a run that fails, unless
    failures are skipped, after the other workers have saved their round; and Interrupted after
    SIGINT or SIGTERM.
    """
    workers: Sequence[Worker] = _module(conduct).workers(
        min(conduct.jobs, len(cells)), conduct, out
    )
    grid = _Grid(deque(cells), conduct, workers)
    _run(grid, out, done, meanwhile)
    if grid.failure:
        raise grid.failure


def _run(
    grid: "_Grid",
    out: Path,
    done: Callable[[RunSpec], None],
    meanwhile: Callable[[Iterable[RunSpec]], None],
) -> None:
    with Interrupts(out) as interrupts:
        try:
            while grid.running or (grid.waiting and not grid.failure and not interrupts.wish):
                if grid.failure or interrupts.wish:
                    for worker in grid.workers:
                        worker.stop()
                else:
                    grid.begin()
                meanwhile([cell for _, cell in grid.running.values()])
                for cell in grid.take_ended():
                    done(cell)
        finally:
            for worker in grid.workers:
                worker.close(at_once=bool(grid.running))
        interrupts.obey()


@dataclass
class _Grid:
    """Runs that wait and those that continue, each in one of the workers."""

    waiting: deque[RunSpec]
    conduct: ExecutionConfig
    workers: Sequence[Worker]
    running: "dict[Future[Outcome], tuple[Worker, RunSpec]]" = field(default_factory=dict)
    deaths: Counter[RunSpec] = field(default_factory=Counter)
    failure: FczooError | None = None

    def begin(self) -> None:
        """Start a run on every idle worker."""
        busy = [worker for worker, _ in self.running.values()]
        for worker in self.workers:
            if worker not in busy and self.waiting:
                cell = self.waiting.popleft()
                self.running[worker.begin(cell, self.conduct)] = worker, cell

    def take_ended(self) -> Iterator[RunSpec]:
        """Yield the runs that have ended, after a short wait.

        A run whose worker died for the first time waits again.
        """
        futures, _ = wait(self.running, WAIT, FIRST_COMPLETED)
        for future in futures:
            worker, cell = self.running.pop(future)
            outcome = worker.outcome(future)
            if outcome.end == "died":
                self.deaths[cell] += 1
                if self.deaths[cell] < TRIES:
                    say(f"{cell.numbered_label}: its process died; once more")
                    self.waiting.appendleft(cell)
                    continue
                outcome = Outcome("failed", f"its process died {TRIES} times; {outcome.error}")
                record_failure(cell, outcome.error)
            if outcome.end == "failed":
                if not (cell.folder_of_run / FAILURE).exists():  # it never came to run
                    record_failure(cell, outcome.error)
                    say(f"{cell.numbered_label}: failed, {outcome.error}")
                if not self.conduct.skip_failed:
                    self.failure = self.failure or FczooError(f"{cell.label}: {outcome.error}")
            yield cell


_benchmarks: dict[Settings, Benchmark] = {}  # in a worker: the benchmark that it ran last


def bench_of(cell: RunSpec) -> Benchmark:
    """Return the run's benchmark in a worker: from shared memory, or opened again."""
    if cell.settings not in _benchmarks:
        _benchmarks.clear()
        _benchmarks[cell.settings] = (
            cell.shared_benchmark.open() if cell.shared_benchmark else Benchmark.open(cell.settings)
        )
    return _benchmarks[cell.settings]


@options_in_messages()
def work(cell: RunSpec, conduct: ExecutionConfig, obey: Callable[[], None]) -> Outcome:
    """Execute one run in a worker, and report every outcome."""
    try:
        # should the parent be gone, no one else begins this run meanwhile
        with gather_warnings(), only_process(cell.folder_of_run):
            run_cell(cell, bench_of(cell), conduct, obey)
    except InterruptedRunError:
        return Outcome("stopped")
    except Exception as error:
        if not isinstance(error, FczooError):
            traceback.print_exc()
        return Outcome("failed", error_text(error))
    return Outcome("done")


@dataclass(frozen=True)
class Command:
    """The command that began the runs, as other machines see it: by files.

    Once ``stop`` is in its run folder, runs end after their round.
    """

    out: Path  # run folder
    base_folder: Path  # where it was given: names of files may be relative

    @property
    def stop(self) -> Path:
        """Return the file that stops every run."""
        return self.out / CLUSTER / "stop"

    def obey(self) -> None:
        """Raise Interrupted once the file is there."""
        if self.stop.exists():
            raise InterruptedRunError("stopped on request", SIGTERM)


def command_in(out: Path) -> Command:
    """Return this command with its run folder; remove stop files of an earlier command."""
    command = Command(out.resolve(), Path.cwd())
    command.stop.parent.mkdir(parents=True, exist_ok=True)
    command.stop.unlink(missing_ok=True)
    return command


def work_on_node(cell: RunSpec, conduct: ExecutionConfig, command: Command) -> Outcome:
    """Execute one run on another machine, if its environment equals the command's."""
    import torch

    os.chdir(command.base_folder)
    torch.set_num_threads(conduct.threads)
    try:
        check_node(cell)
    except FczooError as error:
        return Outcome("failed", error_text(error))
    return work(cell, conduct, command.obey)


def check_node(cell: RunSpec) -> None:
    """Raise FczooError where versions or source differ from those in the folder's ``bench.json``.

    The numbers of this machine would not be those of the table's other rows.
    """
    about = read_about(cell.folder)
    differences = [
        f"{name} is {version} here, {about.versions[name]} where the command was started"
        for name, version in versions().items()
        if about.versions.get(name, version) != version
    ]
    device = str(pick_device(cell.settings.device))
    if device != about.device:
        differences.append(
            f"the runs are to be on {about.device}, it would take {device} (say --device)"
        )
    code = code_of(cell.settings, cell.method)
    differences += [
        f"{name} is another"
        for name, sha256 in code.items()
        if about.code.get(name, sha256) != sha256
    ]
    if differences:
        raise FczooError(
            f"this node cannot take part: {'; '.join(differences[:3])}; give all nodes the same "
            "environment"
        )
