"""Runs that die at a moment that is saved, and what is equal in two runs but for their times."""

import json
from pathlib import Path

from fczoo.federation.checkpoint import Checkpoint
from fczoo.runner.recorder import Recorder

TIMES = ("seconds", "peak_memory", "phases", "sha256")


class Crash(Exception):
    pass


def crash_after(saves: int):
    """What a checkpoint calls: dies at the ``saves``-th snapshot."""
    left = [saves]

    def saved() -> None:
        left[0] -= 1
        if not left[0]:
            raise Crash

    return saved


def timeless(value):
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return value


def rounds(folder: Path) -> list:
    return [timeless(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def recorded(bench, method, folder: Path, checkpoint: Checkpoint | None = None):
    folder.mkdir(exist_ok=True)
    with Recorder(folder) as recorder:
        return bench.run(method, 0, recorder, checkpoint)
