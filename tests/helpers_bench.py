"""``fczoo bench`` in a separate process, and its results."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from helpers_warm import warm_python

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
OF_THE_RUN = ("seconds", "phases", "peak_memory", "sha256")  # what differs from run to run


def start(
    out: Path,
    methods: str,
    *options: str,
    env: Mapping[str, str] = ONE_THREAD,
    python: str | None = None,
) -> subprocess.Popen[str]:
    """Start ``fczoo bench`` as a process.

    Args:
        out: The run folder.
        methods: Names of methods, separated by commas.
        options: Further words of the command.
        env: The environment of the process.
        python: The interpreter. None: one that has imported torch.

    Returns:
        The running process.
    """
    command = [
        python or warm_python(),
        "-m",
        "fczoo",
        "bench",
        "--methods",
        methods,
        *options,
        "--out",
        str(out),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def wait_for(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; return its exit code and its text on stderr."""
    try:
        _, stderr = process.communicate(timeout=400)
        return process.returncode, stderr
    finally:
        process.kill()


def numbers(out: Path) -> dict[str, dict]:
    """Read every run's result without the fields that differ from run to run.

    Args:
        out: The run folder.

    Returns:
        Results by the path of their file below ``out``.
    """
    results = {}
    for file in sorted(out.rglob("result.json")):
        result = json.loads(file.read_text())
        results[str(file.relative_to(out))] = {
            k: v for k, v in result.items() if k not in OF_THE_RUN
        }
    return results


def holders(folder: Path, file: str = "") -> list[int]:
    """List the processes that have a file below ``folder`` open whose path ends with ``file``."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if any(
            name.startswith(f"{folder}/") and name.endswith(file)
            for name in open_files(process.name)
        )
    ]


def open_files(process: str | int) -> list[str]:
    """List the files that a process has open; none if it has ended."""
    try:
        return [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:  # it has ended, or closed a file meanwhile
        return []
