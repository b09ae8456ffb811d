"""One run of a grid: a method with a seed in one setting, written to its folder."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from loky import cpu_count

from fczoo.core.errors import FczooError
from fczoo.core.files import write_json
from fczoo.core.method import Method
from fczoo.federation.benchmark import Bench
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.diagnostics import Probe
from fczoo.federation.observer import Several
from fczoo.federation.result import read_result
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import FAILURE, RESULT
from fczoo.runner.recorder import Recorder
from fczoo.runner.resume import Interrupted
from fczoo.runner.trackers import Logging


@dataclass(frozen=True)
class Conduct:
    """How a grid is run; nothing of it changes a number, but that the last bits depend on the threads."""

    resume: bool = False  # begin nothing new
    skip_failed: bool = False  # carry on after a run that fails
    loggers: tuple[str, ...] = ()
    diagnostics: bool = False
    jobs: int = 1  # runs side by side, each in a process of its own
    accept_changed_code: bool = False  # go on in a folder that other source began

    @property
    def threads(self) -> int:
        """Threads of each run: what this process has or, side by side, its share of the cores."""
        if self.jobs == 1:
            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_count() // self.jobs))


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    folder: Path  # run folder of the setting
    settings: Settings
    method: Method
    seed: int

    @property
    def place(self) -> Path:
        """Folder of this run."""
        return self.folder / self.method.name / f"seed{self.seed}"

    @property
    def label(self) -> str:
        """The run as progress and messages name it."""
        return f"{self.method.name} seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether an earlier command has brought this run to its end."""
        if not (self.place / RESULT).is_file() or (self.place / FAILURE).is_file():
            return False
        known = read_result(self.place / RESULT)
        return len(known.accuracy) == len(known.task_sizes)


def run_cell(cell: Cell, bench: Bench, conduct: Conduct, obey: Callable[[], None]) -> None:
    """Run a cell: one that is finished is kept, one that was broken off goes on after its last saved round.

    ``obey`` is called after every saved round and may raise Interrupted. Whatever else is raised also stands
    in ``failed.json``; with ``conduct.skip_failed`` it is only printed.
    """
    place, checkpoint = cell.place, cell.place / "checkpoint.safetensors"
    if cell.finished:
        Checkpoint(checkpoint).remove()
        print(f"{cell.label}: finished before, kept", file=sys.stderr, flush=True)
        return
    (place / FAILURE).unlink(missing_ok=True)
    try:
        with ExitStack() as stack:
            trackers = [
                stack.enter_context(Logging(name, place, bench.settings.portable()))
                for name in conduct.loggers
            ]
            observer = Several([stack.enter_context(Recorder(place, conduct.jobs == 1)), *trackers])
            probe = Probe(place) if conduct.diagnostics else None
            bench.run(cell.method, cell.seed, observer, Checkpoint(checkpoint, obey), probe)
        Checkpoint(checkpoint).remove()
    except Interrupted:
        raise
    except Exception as error:
        record_failure(cell, described(error))
        if not conduct.skip_failed:
            raise
        print(f"{cell.label}: failed, {error}", file=sys.stderr, flush=True)


def described(error: Exception) -> str:
    """An error in a line: ours speak for themselves, of others the kind says more than the words."""
    return str(error) if isinstance(error, FczooError) else f"{type(error).__name__}: {error}"


def record_failure(cell: Cell, error: str) -> None:
    """Leave ``failed.json`` in the run's folder, which tables name and the next command tries again."""
    write_json(cell.place / FAILURE, {"error": error})
