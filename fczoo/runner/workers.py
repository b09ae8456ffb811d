"""Runs of a grid side by side on this machine, each in a worker process with its share of the threads.

A worker that dies takes its own run with it and no other: each worker is a pool of one process. The run is
begun once more, from its last saved round, and is reported as failed when its worker dies again.
"""

import os
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from loky import ProcessPoolExecutor
from loky.process_executor import BrokenProcessPool

from fczoo.core.errors import FczooError
from fczoo.federation.benchmark import Bench
from fczoo.federation.settings import Settings
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.progress import say
from fczoo.runner.resume import Interrupted, Interrupts, only_process
from fczoo.runner.run_cell import described, record_failure, run_cell
from fczoo.runner.warnings import gathered

TRIES = 2  # of a run whose worker dies
WAIT = 0.5  # seconds between two looks at whether the user wants to stop
IDLE = 10  # seconds after which a process without work ends, so that none outlives a parent that was killed


@dataclass(frozen=True)
class Outcome:
    """How a run in a worker ended: plain values, since an exception may not survive the way back."""

    end: Literal["done", "failed", "stopped"]
    error: str = ""


def run_side_by_side(
    cells: Sequence[Cell], conduct: Conduct, out: Path, done: Callable[[Cell], None]
) -> None:
    """Run ``cells``, ``conduct.jobs`` of them at a time; ``done`` is called here after each.

    Raises FczooError for a run that fails, unless failures are skipped, after the other workers have saved
    their round; and Interrupted after SIGINT or SIGTERM, likewise.
    """
    with TemporaryDirectory(prefix="fczoo-") as folder:
        stop = Path(folder) / "stop"
        count = min(conduct.jobs, len(cells))
        grid = _Grid(deque(cells), conduct, stop, [Worker(i, conduct, stop) for i in range(count)])
        _run(grid, out, done)
    if grid.failure:
        raise grid.failure


def _run(grid: "_Grid", out: Path, done: Callable[[Cell], None]) -> None:
    with Interrupts(out) as interrupts:
        try:
            while grid.running or (grid.waiting and not grid.failure and not interrupts.wish):
                if grid.failure or interrupts.wish:
                    grid.stop.touch()
                else:
                    grid.begin()
                for cell in grid.ended():
                    done(cell)
        finally:
            for worker in grid.workers:
                worker.pool.shutdown(kill_workers=bool(grid.running))
        interrupts.obey()


@dataclass
class _Grid:
    """Runs that wait and those that go on, each in one of the workers."""

    waiting: deque[Cell]
    conduct: Conduct
    stop: Path  # once this file is there, workers end their runs after the round they are in
    workers: "list[Worker]"
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
        """Runs that have ended, after a short wait; one whose process died for the first time waits again."""
        finished, _ = wait(self.running, WAIT, FIRST_COMPLETED)
        for future in finished:
            worker, cell = self.running.pop(future)
            outcome = worker.outcome(future)
            if outcome is None:
                self.deaths[cell] += 1
                if self.deaths[cell] < TRIES:
                    say(f"{cell.numbered}: its process died; once more")
                    self.waiting.appendleft(cell)
                    continue
                advice = "if memory ran out, take fewer --jobs"
                outcome = Outcome("failed", f"its process died {TRIES} times; {advice}")
                record_failure(cell, outcome.error)
            if outcome.end == "failed" and not self.conduct.skip_failed:
                self.failure = self.failure or FczooError(f"{cell.label}: {outcome.error}")
            yield cell


class Worker:
    """A pool of one process, which is replaced when it dies."""

    def __init__(self, number: int, conduct: Conduct, stop: Path):
        self.stop = stop
        self.environment = {"OMP_NUM_THREADS": str(conduct.threads)}
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        if devices:
            self.environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        self._open()

    def _open(self) -> None:
        orders = os.getpid(), self.stop
        self.pool = ProcessPoolExecutor(
            1, timeout=IDLE, env=self.environment, initializer=_prepare, initargs=orders
        )

    def begin(self, cell: Cell, conduct: Conduct) -> "Future[Outcome]":
        """Start a run in this worker's process."""
        future: Future[Outcome] = self.pool.submit(_work, cell, conduct)
        return future

    def outcome(self, future: "Future[Outcome]") -> Outcome | None:
        """How the run ended; None where the process died, which is replaced then."""
        try:
            return future.result()
        except BrokenProcessPool:
            self.pool.shutdown(kill_workers=True)
            self._open()
            return None


_opened: dict[Settings, Bench] = {}  # in a worker: the benchmark that it ran last
_orders: list[tuple[int, Path]] = []  # in a worker: the process that began it, and the file that says stop


def _prepare(parent: int, stop: Path) -> None:
    """In a new worker: signals reach it from the terminal, too, but only its parent says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _orders.append((parent, stop))


def _obey() -> None:
    parent, stop = _orders[0]
    if stop.exists() or os.getppid() != parent:  # told to stop, or left alone
        raise Interrupted("stopped as told", signal.SIGTERM)


def _bench(cell: Cell) -> Bench:
    """The cell's benchmark: what was lent is mapped, else it is opened."""
    if cell.settings not in _opened:
        _opened.clear()
        _opened[cell.settings] = cell.lent.open() if cell.lent else Bench.open(cell.settings)
    return _opened[cell.settings]


def _work(cell: Cell, conduct: Conduct) -> Outcome:
    try:
        # should the parent be gone, nobody else begins this run meanwhile
        with gathered(), only_process(cell.place):
            run_cell(cell, _bench(cell), conduct, _obey)
    except Interrupted:
        return Outcome("stopped")
    except Exception as error:
        if not isinstance(error, FczooError):
            traceback.print_exc()
        return Outcome("failed", described(error))
    return Outcome("done")
