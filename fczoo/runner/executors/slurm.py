"""Slurm executor: runs as jobs of a Slurm cluster, through submitit.

A job that is preempted or reaches its time limit returns to the queue and resumes after its last
saved round. Nodes must find run folder, package, data and weights under the same paths. The command
watches its jobs. A job that ends without a result, because it was cancelled or its node failed,
counts as a process that died.
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
from fczoo.runner.configs import ExecutionConfig, RunSpec
from fczoo.runner.executors import Command, Outcome, prepare_command, work_on_node
from fczoo.runner.progress import print_progress
from fczoo.runner.run_control import CLUSTER

POLL_SECONDS = 2.0  # seconds between two calls of squeue
# reasons for which a job waits without being reported
USUAL_REASONS = (
    "None",
    "Priority",
    "Resources",
    "BeginTime",
    "Dependency",
    "Cleaning",
)
MAX_TIMEOUTS = 10**6  # times that a job may reach its time limit and continue
# seconds that a shared file system may take to show the result of a job that left the queue
GRACE_SECONDS = 15.0


def workers(count: int, execution: ExecutionConfig, out: Path) -> Sequence["SlurmWorker"]:
    """Create ``count`` workers, one per job that is queued or active at the same time.

    Raises FczooError as ``check`` does.
    """
    executor, watcher, command = _executor(execution, out), JobWatcher(), prepare_command(out)
    return [SlurmWorker(executor, watcher, command) for _ in range(count)]


def check(execution: ExecutionConfig) -> None:
    """Raise FczooError if submitit or Slurm is missing, or an option of --cluster is unknown."""
    _executor(execution, Path())


def _executor(execution: ExecutionConfig, out: Path) -> Any:
    """Create submitit's executor, which writes files of jobs below the run folder ``out``."""
    try:
        import submitit
    except ImportError as error:
        raise FczooError(
            "--executor slurm needs submitit; run pip install 'fczoo[slurm]'"
        ) from error
    try:
        _read_queue()
        executor = submitit.AutoExecutor(
            folder=out.resolve() / CLUSTER / "%j",
            cluster="slurm",
            slurm_max_num_timeout=MAX_TIMEOUTS,
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise FczooError(
            f"Slurm does not answer on this machine: {' '.join(str(reason).split())}"
        ) from error
    parameters: dict[str, Any] = {"name": "fczoo", "timeout_min": 240}
    parameters |= {
        name: int(value) if value.isdecimal() else value for name, value in execution.cluster
    }
    if conflicts := parameters.keys() & {"cpus_per_task", "slurm_cpus_per_task"}:
        raise FczooError(f"--cluster {min(conflicts)} is not supported; use threads=N")
    parameters["cpus_per_task"] = parameters.pop("threads", execution.threads)
    try:
        executor.update_parameters(**parameters)
    except (TypeError, ValueError, NameError) as error:
        raise FczooError(f"--cluster for Slurm: {' '.join(str(error).split())}") from error
    return executor


@dataclass
class SlurmWorker:
    """Worker that submits one job at a time."""

    executor: Any  # of submitit
    watcher: "JobWatcher"
    command: Command
    job: Any = None

    def begin(self, run: RunSpec, execution: ExecutionConfig) -> "Future[Outcome]":
        """Submit the run to Slurm."""
        try:
            self.job = self.executor.submit(RequeuedJob(), run, execution, self.command)
        except Exception as error:  # sbatch has many errors, with an explanation each
            reason = " ".join(str(getattr(error, "__cause__", None) or error).split())
            refusal: Future[Outcome] = Future()
            refusal.set_result(Outcome("failed", f"Slurm rejected the job: {reason}"))
            return refusal
        return self.watcher.follow(self.job)

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """Return the outcome of the job."""
        self.job = None
        return future.result()

    def stop(self) -> None:
        """Cancel a job in the queue; stop an active job after its round."""
        self.command.stop_file.touch()
        if self.job is not None and self.watcher.is_pending(self.job):
            self.job.cancel(check=False)
            self.watcher.settle(self.job, Outcome("stopped"))

    def close(self, force: bool) -> None:
        """Stop the job if ``force`` is true."""
        if force and self.job is not None:
            self.job.cancel(check=False)


class RequeuedJob:
    """Callable of a job; submitit calls ``checkpoint`` when the job returns to the queue."""

    def __call__(self, run: RunSpec, execution: ExecutionConfig, command: Command) -> Outcome:
        return work_on_node(run, execution, command)

    def checkpoint(self, run: RunSpec, execution: ExecutionConfig, command: Command) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run, execution, command)


class JobWatcher:
    """One thread that watches all jobs.

    It uses ``squeue``, which every Slurm installation has, and the result files of jobs.
    """

    def __init__(self) -> None:
        # future, and time at which the job left the queue
        self.jobs: dict[Any, tuple[Future[Outcome], float]] = {}
        self.queue_states: dict[str, tuple[str, str]] = {}  # by the latest output of squeue
        self.reported_jobs: set[Any] = set()  # jobs whose reason for waiting was reported
        self.lock = threading.Lock()
        threading.Thread(target=self._poll, daemon=True).start()

    def follow(self, job: Any) -> "Future[Outcome]":
        """Return a future that is done when the job is."""
        future: Future[Outcome] = Future()
        with self.lock:
            self.jobs[job] = future, float("inf")
        return future

    def is_pending(self, job: Any) -> bool:
        """Return whether a job was waiting at the latest call of squeue."""
        return self.queue_states.get(job.job_id, ("", ""))[0] == "PENDING"

    def settle(self, job: Any, outcome: Outcome) -> None:
        """Set the outcome of a job, unless it has one."""
        with self.lock:
            future, _ = self.jobs.pop(job, (None, 0.0))
        if future is not None:
            future.set_result(outcome)

    def _poll(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self.lock:
                jobs = dict(self.jobs)
            if not jobs:
                continue
            try:
                self.queue_states = _read_queue()
            except (OSError, ValueError, subprocess.SubprocessError):
                continue  # the controller may be unavailable for a while
            for job, (future, last_left_at) in jobs.items():
                state, reason = self.queue_states.get(job.job_id, ("", ""))
                if (
                    state == "PENDING"
                    and reason not in USUAL_REASONS
                    and job not in self.reported_jobs
                ):
                    self.reported_jobs.add(job)
                    print_progress(
                        f"job {job.job_id} does not start: {reason}; see squeue, "
                        "or change --cluster"
                    )
                left_at = (
                    float("inf")
                    if job.job_id in self.queue_states
                    else min(last_left_at, time.monotonic())
                )
                outcome = _result(job)
                if outcome is None and time.monotonic() - left_at > GRACE_SECONDS:
                    outcome = Outcome(
                        "died", f"Slurm ended job {job.job_id}; see {job.paths.stderr}"
                    )
                if outcome is not None:
                    self.settle(job, outcome)
                    continue
                with self.lock:
                    if job in self.jobs:  # it may have been settled meanwhile
                        self.jobs[job] = future, left_at


def _result(job: Any) -> Outcome | None:
    """Return the outcome in a job's result file, or None if the file is missing."""
    if not job.paths.result_pickle.exists():
        return None
    try:
        outcome: Outcome = job.result()
    except Exception as error:  # the result file may have any content
        return Outcome("died", f"{type(error).__name__}; see {job.paths.stderr}")
    return outcome


def _read_queue() -> dict[str, tuple[str, str]]:
    """Return state and reason by job, for all waiting or active Slurm jobs of this user."""
    output = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%A %T %r"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    final_states = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    rows = [line.split(maxsplit=2) for line in output.stdout.splitlines()]
    return {job: (state, reason) for job, state, reason in rows if state not in final_states}
