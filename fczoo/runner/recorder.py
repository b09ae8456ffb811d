"""Writes a run's files."""

import os
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, naming
from fczoo.core.method import Method
from fczoo.federation.observer import Silent
from fczoo.federation.result import Result, write_result
from fczoo.reports.run_folder import RESULT, ROUNDS


class Recorder(Silent):
    """Observer that writes a run's files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = (folder / ROUNDS).open("a+b")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.log.seek(0)
        if sum(1 for _ in zip(range(done), self.log, strict=False)) < done:
            raise FczooError(
                f"{self.log.name} lists fewer rounds than the checkpoint beside it; remove {self.folder} "
                "to begin this run anew"
            )
        self.log.truncate(self.log.tell())  # rounds that were logged but not saved are run again

    def round(self, record: dict[str, Any]) -> None:
        with naming(Path(self.log.name)):
            self.log.write(encode_json(record).encode() + b"\n")
            self.log.flush()
            os.fsync(self.log.fileno())

    def task(self, result: Result) -> None:
        write_result(self.folder / RESULT, result)
