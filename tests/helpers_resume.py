"""Runs that are killed at a snapshot, and the parts of two runs that must be equal."""

import json
from pathlib import Path

from fczoo.federation.checkpoint import Checkpoint
from fczoo.runner.execute import RoundWriter

TIMES = ("seconds", "peak_memory", "phases", "sha256")


class Crash(Exception):
    pass


def crash_after(saves: int):
    """Make a hook of a checkpoint that dies at the ``saves``-th snapshot."""
    countdown = [saves]

    def count_save() -> None:
        countdown[0] -= 1
        if not countdown[0]:
            raise Crash

    return count_save


def timeless(value):
    """Remove times, memory and checksums from nested records."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return value


def rounds(folder: Path) -> list:
    """Read the rounds of a run without their times."""
    return [
        timeless(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()
    ]


def run_and_record(bench, method, folder: Path, checkpoint: Checkpoint | None = None):
    """Run a method with seed 0 and record it in a folder."""
    folder.mkdir(exist_ok=True)
    with RoundWriter(folder) as recorder:
        return bench.run(method, 0, recorder, checkpoint)
