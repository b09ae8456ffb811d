"""``fczoo bench`` as a process of its own, and the numbers that it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
OF_THE_RUN = ("seconds", "phases", "peak_memory", "sha256")  # what differs from run to run


def start(
    out: Path, methods: str, *options: str, env: Mapping[str, str] = ONE_THREAD
) -> subprocess.Popen[str]:
    """The command, begun."""
    command = [sys.executable, "-m", "fczoo", "bench", "--methods", methods, *options, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was said on stderr."""
    try:
        _, said = process.communicate(timeout=400)
        return process.returncode, said
    finally:
        process.kill()


def numbers(out: Path) -> dict[str, dict]:
    """Every run's result without what differs from run to run."""
    found = {}
    for file in sorted(out.rglob("result.json")):
        result = json.loads(file.read_text())
        found[str(file.relative_to(out))] = {k: v for k, v in result.items() if k not in OF_THE_RUN}
    return found


def open_files(process: str | int) -> list[str]:
    """What a process has open; nothing of one that has ended."""
    try:
        return [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:  # it has ended, or closed a file meanwhile
        return []
