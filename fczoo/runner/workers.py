"""Runs of a grid side by side: on this machine's cores, on a Slurm cluster, or on a Ray cluster.

What goes on in turn or at the same time changes no number. A worker that dies takes its own run with it and
no other: the run is begun once more, from its last saved round, and has failed when its worker dies again.
Executor NAME is the module ``fczoo.runner.on_NAME``, which has ``check(conduct)`` and
``workers(count, conduct, out)``.
"""

import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

from fczoo.core.errors import FczooError
from fczoo.federation.benchmark import Bench
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import FAILURE
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.progress import say
from fczoo.runner.resume import Interrupted, Interrupts, only_process
from fczoo.runner.run_cell import described, record_failure, run_cell
from fczoo.runner.warnings import gathered

TRIES = 2  # of a run whose worker dies
WAIT = 0.5  # seconds between two looks at whether the user wants to stop


@dataclass(frozen=True)
class Outcome:
    """How a run in a worker ended: plain values, since an exception may not survive the way back."""

    end: Literal["done", "failed", "stopped", "died"]
    error: str = ""


class Worker(Protocol):
    """A place for one run at a time, somewhere else than in this process."""

    def begin(self, cell: Cell, conduct: Conduct) -> "Future[Outcome]":
        """Start a run."""

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """How a run ended whose future is done; afterwards the worker can take the next one."""

    def stop(self) -> None:
        """Ask the run to end after the round it is in; one that has not begun need not begin."""

    def close(self, at_once: bool) -> None:
        """No more runs; ``at_once``: what still goes on is cut off."""


def check_executor(conduct: Conduct) -> None:
    """Raise FczooError for an executor that cannot be used here, or an option that it does not have."""
    _module(conduct).check(conduct)


def _module(conduct: Conduct) -> ModuleType:
    return import_module(f"fczoo.runner.on_{conduct.executor}")


def run_side_by_side(
    cells: Sequence[Cell],
    conduct: Conduct,
    out: Path,
    done: Callable[[Cell], None],
    meanwhile: Callable[[Iterable[Cell]], None],
) -> None:
    """Run ``cells``, ``conduct.jobs`` of them at a time; ``done`` is called here after each, and
    ``meanwhile`` again and again with those that go on.

    Raises FczooError for an executor that cannot be used here, for a run that fails, unless failures are
    skipped, after the other workers have saved their round; and Interrupted after SIGINT or SIGTERM.
    """
    workers: Sequence[Worker] = _module(conduct).workers(min(conduct.jobs, len(cells)), conduct, out)
    grid = _Grid(deque(cells), conduct, workers)
    _run(grid, out, done, meanwhile)
    if grid.failure:
        raise grid.failure


def _run(
    grid: "_Grid", out: Path, done: Callable[[Cell], None], meanwhile: Callable[[Iterable[Cell]], None]
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
                for cell in grid.ended():
                    done(cell)
        finally:
            for worker in grid.workers:
                worker.close(at_once=bool(grid.running))
        interrupts.obey()


@dataclass
class _Grid:
    """Runs that wait and those that go on, each in one of the workers."""

    waiting: deque[Cell]
    conduct: Conduct
    workers: Sequence[Worker]
    running: "dict[Future[Outcome], tuple[Worker, Cell]]" = field(default_factory=dict)
    deaths: Counter[Cell] = field(default_factory=Counter)
    failure: FczooError | None = None

    def begin(self) -> None:
        """A run for every worker that has none."""
        busy = [worker for worker, _ in self.running.values()]
        for worker in self.workers:
            if worker not in busy and self.waiting:
                cell = self.waiting.popleft()
                self.running[worker.begin(cell, self.conduct)] = worker, cell

    def ended(self) -> Iterator[Cell]:
        """Runs that have ended, after a short wait; one whose worker died for the first time waits again."""
        finished, _ = wait(self.running, WAIT, FIRST_COMPLETED)
        for future in finished:
            worker, cell = self.running.pop(future)
            outcome = worker.outcome(future)
            if outcome.end == "died":
                self.deaths[cell] += 1
                if self.deaths[cell] < TRIES:
                    say(f"{cell.numbered}: its process died; once more")
                    self.waiting.appendleft(cell)
                    continue
                outcome = Outcome("failed", f"its process died {TRIES} times; {outcome.error}")
                record_failure(cell, outcome.error)
            if outcome.end == "failed":
                if not (cell.place / FAILURE).exists():  # it never came to run
                    record_failure(cell, outcome.error)
                    say(f"{cell.numbered}: failed, {outcome.error}")
                if not self.conduct.skip_failed:
                    self.failure = self.failure or FczooError(f"{cell.label}: {outcome.error}")
            yield cell


_opened: dict[Settings, Bench] = {}  # in a worker: the benchmark that it ran last


def bench_of(cell: Cell) -> Bench:
    """In a worker: the cell's benchmark; what was lent is mapped, else it is opened."""
    if cell.settings not in _opened:
        _opened.clear()
        _opened[cell.settings] = cell.lent.open() if cell.lent else Bench.open(cell.settings)
    return _opened[cell.settings]


def work(cell: Cell, conduct: Conduct, obey: Callable[[], None]) -> Outcome:
    """In a worker: one run, whatever happens in it."""
    try:
        # should the parent be gone, nobody else begins this run meanwhile
        with gathered(), only_process(cell.place):
            run_cell(cell, bench_of(cell), conduct, obey)
    except Interrupted:
        return Outcome("stopped")
    except Exception as error:
        if not isinstance(error, FczooError):
            traceback.print_exc()
        return Outcome("failed", described(error))
    return Outcome("done")
