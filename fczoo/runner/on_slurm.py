"""Runs as jobs of a Slurm cluster, through submitit.

A job that is preempted or reaches its time limit is put back into the queue and goes on after its last
saved round.
The run folder, the package, data and weights must be seen by the nodes under the same paths. The command
watches the jobs; one that ends without a word, since it was cancelled or its node failed, counts as a process
that died.
"""

import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.cluster import Command, command_in, work_on_node
from fczoo.runner.progress import say
from fczoo.runner.resume import CLUSTER
from fczoo.runner.workers import Outcome

LOOK = 2.0  # seconds between two looks at the queue
USUAL = (
    "None",
    "Priority",
    "Resources",
    "BeginTime",
    "Dependency",
    "Cleaning",
)  # of a job that waits its turn
ALWAYS = 10**6  # times that a job may reach its limit and go on
GRACE = 15.0  # seconds that a shared file system may take to show the result of a job that has left the queue


def workers(count: int, conduct: Conduct, out: Path) -> Sequence["SlurmWorker"]:
    """One worker a job that may be in the queue at the same time. Raises FczooError as ``check``."""
    executor, watch, command = _executor(conduct, out), Watch(), command_in(out)
    return [SlurmWorker(executor, watch, command) for _ in range(count)]


def check(conduct: Conduct) -> None:
    """Raise FczooError where submitit or Slurm is missing, or an option of --cluster is none of theirs."""
    _executor(conduct, Path())


def _executor(conduct: Conduct, out: Path) -> Any:
    """submitit's, which writes below the run folder ``out`` once it has a job."""
    try:
        import submitit
    except ImportError as error:
        raise FczooError("--executor slurm needs submitit; run pip install 'fczoo[slurm]'") from error
    try:
        _queued()
        executor = submitit.AutoExecutor(
            folder=out.resolve() / CLUSTER / "%j", cluster="slurm", slurm_max_num_timeout=ALWAYS
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise FczooError(f"no Slurm answers here: {' '.join(str(reason).split())}") from error
    wanted: dict[str, Any] = {"name": "fczoo", "timeout_min": 240}
    wanted |= {name: int(value) if value.isdecimal() else value for name, value in conduct.cluster}
    if named := wanted.keys() & {"cpus_per_task", "slurm_cpus_per_task"}:
        raise FczooError(f"--cluster {min(named)} is not taken; say threads=N")
    wanted["cpus_per_task"] = wanted.pop("threads", conduct.threads)
    try:
        executor.update_parameters(**wanted)
    except (TypeError, ValueError, NameError) as error:
        raise FczooError(f"--cluster for Slurm: {' '.join(str(error).split())}") from error
    return executor


@dataclass
class SlurmWorker:
    """One job in the queue or on a node."""

    executor: Any  # submitit's
    watch: "Watch"
    command: Command
    job: Any = None

    def begin(self, cell: Cell, conduct: Conduct) -> "Future[Outcome]":
        """Hand the run to Slurm."""
        try:
            self.job = self.executor.submit(Requeued(), cell, conduct, self.command)
        except Exception as error:  # sbatch refuses in many ways, each of which it explains
            said = " ".join(str(getattr(error, "__cause__", None) or error).split())
            refused: Future[Outcome] = Future()
            refused.set_result(Outcome("failed", f"Slurm takes no job: {said}"))
            return refused
        return self.watch.over(self.job)

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """How the job ended."""
        self.job = None
        return future.result()

    def stop(self) -> None:
        """A job that waits is taken out of the queue; one that runs ends after its round."""
        self.command.stop.touch()
        if self.job is not None and self.watch.waits(self.job):
            self.job.cancel(check=False)
            self.watch.settle(self.job, Outcome("stopped"))

    def close(self, at_once: bool) -> None:
        """Take the job away if it must be at once."""
        if at_once and self.job is not None:
            self.job.cancel(check=False)


class Requeued:
    """What a job runs. submitit asks ``checkpoint`` what to run when the job is put back into the queue: the
    same again, which goes on after the last saved round.
    """

    def __call__(self, cell: Cell, conduct: Conduct, command: Command) -> Outcome:
        return work_on_node(cell, conduct, command)

    def checkpoint(self, cell: Cell, conduct: Conduct, command: Command) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, cell, conduct, command)


class Watch:
    """One thread that looks at all jobs: by ``squeue``, which every Slurm has, and the files they leave."""

    def __init__(self) -> None:
        self.jobs: dict[Any, tuple[Future[Outcome], float]] = {}  # since when it is out of the queue
        self.queued: dict[str, tuple[str, str]] = {}  # as squeue said last
        self.told: set[Any] = set()  # jobs of which it was said why they do not start
        self.lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def over(self, job: Any) -> "Future[Outcome]":
        """Will be done when the job is."""
        future: Future[Outcome] = Future()
        with self.lock:
            self.jobs[job] = future, float("inf")
        return future

    def waits(self, job: Any) -> bool:
        """Whether a job had not begun when the queue was looked at last."""
        return self.queued.get(job.job_id, ("", ""))[0] == "PENDING"

    def settle(self, job: Any, outcome: Outcome) -> None:
        """Say how a job ended, once."""
        with self.lock:
            future, _ = self.jobs.pop(job, (None, 0.0))
        if future is not None:
            future.set_result(outcome)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK)
            with self.lock:
                known = dict(self.jobs)
            if not known:
                continue
            try:
                self.queued = _queued()
            except (OSError, ValueError, subprocess.SubprocessError):
                continue  # the controller may be away for a while
            for job, (future, gone) in known.items():
                state, reason = self.queued.get(job.job_id, ("", ""))
                if state == "PENDING" and reason not in USUAL and job not in self.told:
                    self.told.add(job)
                    say(f"job {job.job_id} does not start: {reason}; see squeue, or give another --cluster")
                left = float("inf") if job.job_id in self.queued else min(gone, time.monotonic())
                outcome = _result(job)
                if outcome is None and time.monotonic() - left > GRACE:
                    outcome = Outcome("died", f"Slurm ended job {job.job_id}; see {job.paths.stderr}")
                if outcome is not None:
                    self.settle(job, outcome)
                    continue
                with self.lock:
                    if job in self.jobs:  # it may have been settled meanwhile
                        self.jobs[job] = future, left


def _result(job: Any) -> Outcome | None:
    """What a job left, if it has ended of itself."""
    if not job.paths.result_pickle.exists():
        return None
    try:
        outcome: Outcome = job.result()
    except Exception as error:  # whatever a job may leave in place of its result
        return Outcome("died", f"{type(error).__name__}; see {job.paths.stderr}")
    return outcome


def _queued() -> dict[str, tuple[str, str]]:
    """Job -> its state and why it waits, of all jobs of this user that Slurm still has."""
    told = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%A %T %r"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ended = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    rows = [line.split(maxsplit=2) for line in told.stdout.splitlines()]
    return {job: (state, reason) for job, state, reason in rows if state not in ended}
