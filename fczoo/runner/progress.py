"""How the runs of a grid get on: lines on stderr and in ``log.txt``, and on a terminal one bar over all."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fczoo.core.method import Method
from fczoo.core.metrics import all_metrics
from fczoo.core.streams import is_terminal
from fczoo.federation.observer import Silent
from fczoo.federation.result import Result, read_result
from fczoo.reports.run_folder import ABOUT, FAILURE, LOG, RESULT
from fczoo.runner.cell import Cell

log = logging.getLogger("fczoo.progress")
log.setLevel(logging.INFO)

BAR = "{desc} {percentage:3.0f} % |{bar}| {elapsed} gone, {remaining} to go{postfix}"


def say(text: str) -> None:
    """A line on stderr, above a bar where there is one, and in the log."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
    log.info(text)


@contextmanager
def logged(file: Path) -> Iterator[logging.Handler]:
    """Add messages and warnings inside it to a file, with the time."""
    handler = logging.FileHandler(file, encoding="utf-8", delay=True, errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this: it is no terminal, and shows a bar all the same."""
    shells = sys.modules.get("IPython")  # ipykernel may be imported without it
    return shells is not None and "ipykernel" in sys.modules and shells.get_ipython() is not None


class Progress:
    """How many of a grid's runs have ended, which is the best, and how long the others may take."""

    def __init__(self, cells: Sequence[Cell]):
        self.total, self.begin = len(cells), time.monotonic()
        self.kept = sum(cell.finished for cell in cells)  # by an earlier command
        self.over = 0  # ended
        self.best: dict[Path, tuple[float, str]] = {}  # of each setting: A_N and the run
        self.seen: dict[Cell, tuple[int, Result | None]] = {}  # time of a run's file, and what stood there
        folders = list(dict.fromkeys(cell.folder for cell in cells))
        place = folders[0] / LOG if len(folders) == 1 else f"{LOG} beside each {ABOUT}"
        protocols = sorted({str(cell.settings.protocol) for cell in cells if cell.settings.protocol})
        followed = f", protocol {' and '.join(protocols)}" if protocols else ""
        followed += " (--protocol none: the data set's own schedule)" if "quick" in protocols else ""
        say(f"{self.total} run{'s' * (self.total > 1)}{followed}; log: {place}")
        shown = is_terminal(sys.stderr) or in_notebook()
        self.bar = tqdm(total=self.total, disable=not shown, leave=False, smoothing=0, bar_format=BAR)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def ended(self, cell: Cell) -> None:
        """A run is over: finished, kept, failed, or broken off, which does not count."""
        if not (cell.finished or (cell.place / FAILURE).exists()):
            return
        self.over += 1
        if cell in self.seen:
            self._read(cell)
        else:
            self.move(0.0)
        if cell.finished:
            a_n = read_result(cell.place / RESULT).metrics["A_N"]
            if a_n > self.best.get(cell.folder, (-1.0, ""))[0]:  # not where it is NaN
                self.best[cell.folder] = a_n, cell.label
        if self.total > 1:
            parts = [f"{self.over} of {self.total} runs ended"]
            if best := self.best.get(cell.folder):
                parts.append(f"best so far {best[0]:.1f} %, {best[1]}")
            say("; ".join([*parts, *self._left()]))

    def follow(self, cells: Iterable[Cell]) -> None:
        """Tell of runs that go on in other processes what these have left in their folders since."""
        parts, words = 0.0, []
        for cell in cells:
            result = self._read(cell)
            if result is not None:
                parts += len(result.accuracy) / len(result.task_sizes)
            words.append(f"{cell.label} {result.metrics['A_N']:.1f} %" if result else cell.label)
        self.bar.set_description_str(f"{self.over} of {self.total} runs", refresh=False)
        self.bar.set_postfix_str(", ".join(words), refresh=False)
        self.move(parts)

    def _read(self, cell: Cell) -> Result | None:
        """What a run has come to; tasks that are new in it are told."""
        try:
            written = (cell.place / RESULT).stat().st_mtime_ns
        except FileNotFoundError:
            self.seen.setdefault(cell, (0, None))
            return None
        before, known = self.seen.get(cell, (0, None))
        if written == before:
            return known
        result = read_result(cell.place / RESULT)
        if cell in self.seen:
            for done in range(len(known.accuracy) if known else 0, len(result.accuracy)):
                say(after_task(cell, result, done + 1))
        self.seen[cell] = written, result
        return result

    def move(self, part: float) -> None:
        """The bar, ``part`` of the way through the run that goes on."""
        self.bar.initial = self.kept
        self.bar.n = max(self.over + part, self.bar.initial)
        self.bar.refresh()

    def _left(self) -> list[str]:
        done, rest = self.over - self.kept, self.total - self.over
        if done <= 0 or not rest:
            return []
        seconds = (time.monotonic() - self.begin) / done * rest
        return [f"about {seconds / 60:.0f} min to go" if seconds >= 90 else f"about {seconds:.0f} s to go"]


class Shown(Silent):
    """Observer that tells how one run gets on."""

    def __init__(self, cell: Cell, progress: Progress | None):
        self.cell, self.progress = cell, progress
        self.done = self.rounds = 0

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        _tell_warnings()
        self.rounds, self.done = rounds, done
        if self.progress:
            self.progress.bar.set_description_str(self.cell.numbered)

    def client(self, task: int, round: int, loss: float) -> None:
        if self.progress:
            self.progress.bar.set_postfix_str(f"task {task + 1}, round {round + 1}, loss {loss:.3f}")

    def round(self, record: dict[str, Any]) -> None:
        self.done += 1
        if self.progress:
            self.progress.move(self.done / self.rounds)

    def task(self, result: Result) -> None:
        _tell_warnings()
        done = len(result.accuracy)
        (say if self.progress else log.info)(after_task(self.cell, result, done))  # else ``follow`` says it
        if self.progress and not self.rounds:
            self.progress.move(done / len(result.task_sizes))


def after_task(cell: Cell, result: Result, done: int) -> str:
    """What a run has come to after so many tasks."""
    a_t = all_metrics(result.accuracy[:done], result.test_counts)["A_N"]
    tasks = f"task {done} of {len(result.task_sizes)}"
    return f"{cell.numbered}: {tasks}, {a_t:.1f} % over the classes seen, {result.seconds:.0f} s"


def _tell_warnings() -> None:
    """Warnings that were gathered so far are told now, not when the command ends."""
    for handler in logging.getLogger().handlers:
        handler.flush()
