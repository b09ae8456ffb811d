"""Processes of Flower: how they are begun, where their files go, and what its commands say."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError

LOG, HOME = "flower.log", ".flower"  # what Flower itself has to say, and where its own files go
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # everybody has what is needed, or cannot take part
}
ENDS_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux, which alone has it
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@contextmanager
def for_owner_alone() -> Iterator[None]:
    """Nobody else can read the files that are made inside, by this process or one that it begins."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower, which ends with what is done inside; on Linux also where this one is killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the process ends, too
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, env=_environment(folder), stdout=log, stderr=log, preexec_fn=_end_with_parent
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _end_with_parent() -> None:
    if LIBC is not None:
        LIBC.prctl(ENDS_WITH_PARENT, signal.SIGTERM)


def _environment(folder: Path) -> dict[str, str]:
    """Flower's files go into the folder, and its commands are found where this Python is."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(folder / HOME), "PATH": path}


def flwr(folder: Path, *words: str) -> dict[str, Any]:
    """What a command of Flower says as JSON. Raises FczooError where it fails or says something else.

    Its exit status tells nothing: it is 0 after some errors.
    """
    command = ["flwr", *words, "--format", "json"]
    done = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout)
        if said.get("success"):
            return said
        reason = said.get("error-message") or said
    except ValueError:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or done.returncode
    raise FczooError(f"flwr {words[0]} failed: {' '.join(str(reason).split())}")
