"""Progress of a sweep: lines on stderr and in ``log.txt``, and a bar on a terminal."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fczoo.core.command_messages import Level, message_line, message_style
from fczoo.core.errors import LogFile
from fczoo.core.method import Method
from fczoo.core.metrics import all_metrics
from fczoo.core.terminal import is_terminal
from fczoo.federation.callbacks import Callback
from fczoo.federation.result import Result, read_result
from fczoo.reports.run_folder import BENCH, FAILURE, LOG, RESULT
from fczoo.runner.configs import RunSpec, is_finished

log = logging.getLogger("fczoo.progress")
log.setLevel(logging.INFO)

BAR = "{desc} {percentage:3.0f} % |{bar}| {elapsed} elapsed, {remaining} left{postfix}"


def print_progress(text: str, level: Level = "INFO") -> None:
    """Print a line on stderr, above the bar if there is one, and log it.

    Args:
        text: Line to print, in the command's style of messages.
        level: ``DEBUG`` for lines of ``--verbose``, which are not logged.
    """
    if line := message_line(level, text):
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()
    if level != "DEBUG":
        log.info(text)


@contextmanager
def log_to_file(file: Path) -> Iterator[logging.Handler]:
    """Append messages and warnings to a file inside a ``with`` block, with the time."""
    handler = LogFile(file, encoding="utf-8", delay=True, errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which shows bars without a terminal."""
    shells = sys.modules.get("IPython")  # ipykernel may be imported without it
    return shells is not None and "ipykernel" in sys.modules and shells.get_ipython() is not None


class Progress:
    """Progress of a sweep: finished runs, the best run, and the remaining time."""

    def __init__(self, runs: Sequence[RunSpec]):
        self.total, self.started_at = len(runs), time.monotonic()
        self.ended = 0
        self.skipped = 0  # ended runs that an earlier command finished
        self.best: dict[Path, tuple[float, str]] = {}  # A_N and label of the best run by setting
        # modification time and content of a run's result file
        self.results_by_run: dict[RunSpec, tuple[int, Result | None]] = {}
        folders = list(dict.fromkeys(run.folder for run in runs))
        log_place = folders[0] / LOG if len(folders) == 1 else f"{LOG} next to each {BENCH}"
        protocols = sorted(
            {str(run.config.settings.protocol) for run in runs if run.config.settings.protocol}
        )
        protocol_note = f", protocol {' and '.join(protocols)}" if protocols else ""
        protocol_note += (
            " (--protocol none: the data set's own schedule)" if "quick" in protocols else ""
        )
        print_progress(f"{self.total} run{'s' * (self.total > 1)}{protocol_note}; log: {log_place}")
        visible = message_style().has_bars and (is_terminal(sys.stderr) or in_notebook())
        self.bar = tqdm(
            total=self.total, disable=not visible, leave=False, smoothing=0, bar_format=BAR
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def count_ended(self, run: RunSpec, skipped: bool = False) -> None:
        """Count a finished or failed run, ``skipped`` if an earlier command finished it.

        An interrupted run does not count.
        """
        finished = is_finished(run)
        if not (finished or (run.folder_of_run / FAILURE).exists()):
            return
        self.ended += 1
        self.skipped += skipped
        if run in self.results_by_run:
            self._read(run)
        else:
            self.move(0.0)
        if finished:
            a_n = read_result(run.folder_of_run / RESULT).metrics["A_N"]
            if a_n > self.best.get(run.folder, (-1.0, ""))[0]:  # not where it is NaN
                self.best[run.folder] = a_n, run.label
        if self.total > 1:
            parts = [f"{self.ended} of {self.total} runs ended"]
            if best := self.best.get(run.folder):
                parts.append(f"best so far {best[0]:.1f} %, {best[1]}")
            print_progress("; ".join([*parts, *self._time_left()]))

    def follow(self, runs: Iterable[RunSpec]) -> None:
        """Report the progress of runs in other processes, as their result files show it."""
        tasks_done, labels = 0.0, []
        for run in runs:
            result = self._read(run)
            if result is not None:
                tasks_done += len(result.accuracy) / len(result.task_sizes)
            labels.append(f"{run.label} {result.metrics['A_N']:.1f} %" if result else run.label)
        self.bar.set_description_str(f"{self.ended} of {self.total} runs", refresh=False)
        self.bar.set_postfix_str(", ".join(labels), refresh=False)
        self.move(tasks_done)

    def _read(self, run: RunSpec) -> Result | None:
        """Read the current result of a run and report its new tasks."""
        try:
            written = (run.folder_of_run / RESULT).stat().st_mtime_ns
        except FileNotFoundError:
            self.results_by_run.setdefault(run, (0, None))
            return None
        last_time, last_result = self.results_by_run.get(run, (0, None))
        if written == last_time:
            return last_result
        result = read_result(run.folder_of_run / RESULT)
        if run in self.results_by_run:
            for task_index in range(
                len(last_result.accuracy) if last_result else 0, len(result.accuracy)
            ):
                print_progress(describe_task(run, result, task_index + 1))
        self.results_by_run[run] = written, result
        return result

    def move(self, part: float) -> None:
        """Move the bar; ``part`` is the finished part of the active runs, in runs."""
        self.bar.initial = self.skipped
        self.bar.n = max(self.ended + part, self.bar.initial)
        self.bar.refresh()

    def _time_left(self) -> list[str]:
        new_runs, remaining_runs = self.ended - self.skipped, self.total - self.ended
        if new_runs <= 0 or not remaining_runs:
            return []
        seconds = (time.monotonic() - self.started_at) / new_runs * remaining_runs
        return [
            f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
        ]


class ProgressCallback(Callback):
    """Callback that reports the progress of one run."""

    def __init__(self, run: RunSpec, progress: Progress | None):
        self.run, self.progress = run, progress
        self.done = self.rounds = 0

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        _flush_warnings()
        self.rounds, self.done = rounds, done
        if self.progress:
            self.progress.bar.set_description_str(self.run.numbered_label)

    def client(self, task: int, round: int, loss: float) -> None:
        if self.progress:
            self.progress.bar.set_postfix_str(
                f"task {task + 1}, round {round + 1}, loss {loss:.3f}"
            )

    def round(self, record: dict[str, Any]) -> None:
        self.done += 1
        if self.progress:
            print_progress(describe_round(self.run, record), "DEBUG")
            self.progress.move(self.done / self.rounds)

    def task(self, result: Result) -> None:
        _flush_warnings()
        task_count = len(result.accuracy)
        (print_progress if self.progress else log.info)(
            describe_task(self.run, result, task_count)
        )  # else ``follow`` reports it
        if self.progress and not self.rounds:
            self.progress.move(task_count / len(result.task_sizes))


def describe_task(run: RunSpec, result: Result, done: int) -> str:
    """Describe the accuracy of a run after ``done`` tasks."""
    a_t = all_metrics(result.accuracy[:done], result.test_counts)["A_N"]
    tasks = f"task {done} of {len(result.task_sizes)}"
    return (
        f"{run.numbered_label}: {tasks}, {a_t:.1f} % over the classes seen, {result.seconds:.0f} s"
    )


def describe_round(run: RunSpec, record: Mapping[str, Any]) -> str:
    """Describe the loss and accuracy of a round, given its record in ``rounds.jsonl``."""
    parts = [f"{run.numbered_label}: task {record['task'] + 1}, round {record['round'] + 1}"]
    if record["loss"] is not None:
        parts.append(f"loss {record['loss']:.3f}")
    if record.get("accuracy") is not None:
        parts.append(f"{record['accuracy']:.1f} % over the classes seen")
    return ", ".join(parts)


def _flush_warnings() -> None:
    """Print the warnings collected so far, instead of at the end of the command."""
    for handler in logging.getLogger().handlers:
        handler.flush()
