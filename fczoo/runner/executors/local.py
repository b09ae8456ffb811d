"""Local executor: one process per parallel run, each with its share of the threads and one GPU."""

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import torch
from loky import ProcessPoolExecutor
from loky.process_executor import BrokenProcessPool

from fczoo.core.errors import InterruptedCommandError
from fczoo.core.terminal import HANGUP
from fczoo.runner.configs import ExecutionConfig, RunSpec
from fczoo.runner.executors import Outcome, work
from fczoo.runner.shared_memory import shared_folder

# seconds after which an idle process ends, so that none outlives a killed parent
IDLE_SECONDS = 10


def workers(count: int, execution: ExecutionConfig, out: Path) -> Sequence["CoreWorker"]:
    """Create ``count`` workers, one per parallel run."""
    return [CoreWorker(number, execution) for number in range(count)]


def check(execution: ExecutionConfig) -> None:
    """Do nothing; local cores have no requirements."""


class CoreWorker:
    """Worker with a pool of one process, which is replaced if it dies."""

    def __init__(self, number: int, execution: ExecutionConfig):
        self.resources = ExitStack()
        self.stop_file = self.resources.enter_context(shared_folder()) / "stop"
        self.environment = {"OMP_NUM_THREADS": str(execution.threads)}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = (
            visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        )
        if devices:
            self.environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        self._open()

    def begin(self, run: RunSpec, execution: ExecutionConfig) -> "Future[Outcome]":
        """Start a run in this worker's process."""
        future: Future[Outcome] = self.pool.submit(_work, run, execution)
        return future

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """Return the outcome of the run; replace a process that died."""
        try:
            return future.result()
        except BrokenProcessPool:
            self.pool.shutdown(kill_workers=True)
            self._open()
            return Outcome("died", "if memory ran out, lower --jobs")

    def stop(self) -> None:
        """Write the file that the process checks after every round."""
        self.stop_file.touch()

    def close(self, force: bool) -> None:
        """End the process."""
        self.pool.shutdown(kill_workers=force)
        self.resources.close()

    def _open(self) -> None:
        parent = os.getpid(), self.stop_file
        self.pool = ProcessPoolExecutor(
            1, timeout=IDLE_SECONDS, env=self.environment, initializer=_prepare, initargs=parent
        )


# in a worker: its parent process, and the file that stops it
_parent: list[tuple[int, Path]] = []


def _prepare(parent: int, stop: Path) -> None:
    """Ignore signals in a new worker, whose parent decides when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, *HANGUP):
        signal.signal(number, signal.SIG_IGN)
    _parent.append((parent, stop))


def _check_interrupt() -> None:
    parent, stop = _parent[0]
    if stop.exists() or os.getppid() != parent:  # asked to stop, or orphaned
        raise InterruptedCommandError("stopped on request", signal.SIGTERM)


def _work(run: RunSpec, execution: ExecutionConfig) -> Outcome:
    outcome = work(run, execution, _check_interrupt)
    # Without the parent no one reads the outcome, and loky would wait 40 s for another run.
    if os.getppid() != _parent[0][0]:
        os._exit(0)
    return outcome
