"""Ray executor: runs as tasks of a Ray cluster, which may be started on this machine.

Ray's own retries are off. ``run_in_parallel`` restarts a run whose worker died, after its last
saved round.
"""

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.options import quote
from fczoo.runner.configs import CLIENTS, ExecutionConfig, RunSpec
from fczoo.runner.executors import Command, Outcome, prepare_command, work_on_node

# --cluster address=new: a cluster on this machine, which ends with the command
LOCAL_CLUSTER = "new"
CONNECT_TIMEOUT = 20.0  # seconds within which a process must be able to join the cluster
CONNECT_SCRIPT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"


def workers(count: int, execution: ExecutionConfig, out: Path) -> Sequence["RayWorker"]:
    """Create ``count`` workers, one per task of the cluster.

    Raises FczooError as ``connect`` does.
    """
    ray, options = connect(execution)
    task = ray.remote(**options, max_retries=0)(work_on_node)
    command = prepare_command(out)
    return [RayWorker(task, command) for _ in range(count)]


def check(execution: ExecutionConfig) -> None:
    """Raise FczooError if Ray is missing, no cluster answers, or --cluster is invalid."""
    _, address, _ = _cluster_options(execution)
    if address != LOCAL_CLUSTER:
        _check_cluster(address)


def _cluster_options(execution: ExecutionConfig) -> tuple[Any, str, float]:
    """Return Ray, the address of its cluster, and the GPUs per worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise FczooError("--executor ray needs Ray; run pip install 'fczoo[ray]'") from error
    options = dict(execution.cluster)
    address, gpus, spread = (
        options.pop("address", LOCAL_CLUSTER),
        options.pop("gpus", "0"),
        options.pop("spread", "runs"),
    )
    if unknown := options.keys() - {"threads"}:
        names = ", ".join(sorted(unknown))
        raise FczooError(f"--cluster for Ray takes address, threads, gpus and spread; not {names}")
    if not re.fullmatch(r"\d{1,3}(\.\d{1,4})?", gpus, re.ASCII):
        raise FczooError(f"--cluster gpus is {quote(gpus)}; it must be a number such as 1 or 0.5")
    if spread not in ("runs", CLIENTS):
        raise FczooError(f"--cluster spread is {quote(spread)}; it must be runs or {CLIENTS}")
    return ray, address, float(gpus)


def connect(execution: ExecutionConfig) -> tuple[Any, dict[str, Any]]:
    """Connect to a Ray cluster; return Ray and the resources per worker.

    Raises FczooError as ``check`` does.
    """
    ray, address, gpus = _cluster_options(execution)
    if address == LOCAL_CLUSTER:
        # shared secret of the cluster's processes; Ray would store its own in a file
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # by default Ray lowers the priority of its workers
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(
            address="local" if address == LOCAL_CLUSTER else address,
            include_dashboard=False if address == LOCAL_CLUSTER else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise FczooError(
            f"no Ray cluster answers at {address}: {' '.join(str(error).split())}"
        ) from error
    fczoo_variables = {
        name: value for name, value in os.environ.items() if name.startswith("FCZOO_")
    }
    environment = {"env_vars": {**fczoo_variables, "OMP_NUM_THREADS": str(execution.threads)}}
    return ray, {"num_cpus": execution.threads, "num_gpus": gpus, "runtime_env": environment}


def _check_cluster(address: str) -> None:
    """Raise FczooError if HOST:PORT has no listener, or one that is not a Ray cluster.

    Ray would wait for minutes, without a timeout. Therefore another process, which can be ended,
    joins the cluster first.
    """
    host, sign, port = address.rpartition(":")
    if not sign or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise FczooError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        # only a timeout matters here: this process reports all other errors when it joins
        subprocess.run(
            [sys.executable, "-c", CONNECT_SCRIPT, address],
            capture_output=True,
            timeout=CONNECT_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"the process on this port did not answer within {CONNECT_TIMEOUT:.0f} s"
        raise FczooError(f"no Ray cluster answers at {address}: {problem}") from error


@dataclass
class RayWorker:
    """Worker that submits one task to the cluster at a time."""

    task: Any
    command: Command
    reference: Any = None

    def begin(self, run: RunSpec, execution: ExecutionConfig) -> "Future[Outcome]":
        """Submit the run to the cluster."""
        self.reference = self.task.remote(run, execution, self.command)
        future: Future[Outcome] = self.reference.future()
        return future

    def outcome(self, future: "Future[Outcome]") -> Outcome:
        """Return the outcome of the task: ``died`` if its process or node was lost."""
        import ray

        try:
            return future.result()
        except ray.exceptions.OutOfMemoryError:
            return Outcome("died", "memory ran out on its node; lower --jobs")
        except ray.exceptions.RayError as error:
            return Outcome("died", f"{type(error).__name__} on the cluster")

    def stop(self) -> None:
        """Write the stop file: all tasks end after their round."""
        self.command.stop_file.touch()

    def close(self, force: bool) -> None:
        """Stop the task if ``force`` is true, and leave the cluster."""
        import ray

        if force and self.reference is not None and ray.is_initialized():
            ray.cancel(self.reference, force=True)
        ray.shutdown()
