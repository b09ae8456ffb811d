"""Writes a run's files and shows its progress."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.federation.result import Result, write_result
from fczoo.reports.run_folder import RESULT, ROUNDS


class Recorder:
    """Observer that shows a progress bar (plain lines where there
    is no terminal) and writes a run's files.
    """

    def __init__(self, folder: Path, bar: bool = True):
        self.folder = folder
        self.plain = not (bar and sys.stderr.isatty())  # bars of several processes would overwrite each other
        self.log = (folder / ROUNDS).open("a+b")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
        if hasattr(self, "bar"):
            self.bar.close()

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.log.seek(0)
        if sum(1 for _ in zip(range(done), self.log, strict=False)) < done:
            raise FczooError(
                f"{self.log.name} lists fewer rounds than the checkpoint beside it; remove {self.folder} "
                "to begin this run anew"
            )
        self.log.truncate(self.log.tell())  # rounds that were logged but not saved are run again
        self.label = f"{method.name} seed {seed}"
        _tell_warnings()
        self.bar = tqdm(
            total=rounds,
            initial=done,
            desc=self.label,
            unit="round",
            disable=self.plain,
            leave=False,
        )

    def client(self, task: int, round: int, loss: float) -> None:
        self.bar.set_postfix_str(f"task {task + 1}, round {round + 1}, loss {loss:.3f}")

    def round(self, record: dict[str, Any]) -> None:
        self.bar.update()
        self.log.write(json.dumps(record).encode() + b"\n")
        self.log.flush()
        os.fsync(self.log.fileno())

    def task(self, result: Result) -> None:
        done = len(result.accuracy)
        write_result(self.folder / RESULT, result)
        _tell_warnings()
        if self.plain:
            a_t = f"{result.metrics['A_N']:.1f} % over the classes seen"
            print(
                f"{self.label}: task {done} of {len(result.task_sizes)}, {a_t}, {result.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def _tell_warnings() -> None:
    """Warnings that were gathered so far are told now, not when the command ends."""
    for handler in logging.getLogger().handlers:
        handler.flush()
