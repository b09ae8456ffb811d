"""Warnings of a command: equal ones are one line, with how often and where."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from fczoo.core.files import encode_json
from fczoo.core.place import place

NAMED = 3  # places that a line names


class Warned(NamedTuple):
    """A warning and its place, such as a task or a client; the place may be empty."""

    text: str
    place: str


def warning_lines(warnings: Iterable[Warned]) -> list[str]:
    """Merge equal warnings into one line each, with their number and their first places."""
    places: dict[str, list[str]] = {}
    for warning in warnings:
        places.setdefault(warning.text, []).append(warning.place)
    return [f"{text}{_where(found)}" for text, found in places.items()]


def _where(places: list[str]) -> str:
    named = list(dict.fromkeys(filter(None, places)))
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    where = f"{'; '.join(named[:NAMED])}{more}"
    times = f"{len(places)} times" if len(places) > 1 else ""
    about = ": ".join(filter(None, (times, where)))
    return f" ({about})" if about else ""


class WarningRecorder(logging.Handler):
    """Record each different warning that is given inside a ``with`` block, in ``file`` if there is one.

    Warnings that the file holds already are not repeated: a run that resumes may give them again.
    """

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.file = file
        self.warnings = dict.fromkeys(read_warnings(file) if file else ())

    def __enter__(self) -> "WarningRecorder":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(Warned(record.getMessage(), place()))

    def add(self, *warnings: Warned) -> None:
        """Record warnings as if they were given now."""
        for warning in warnings:
            if warning in self.warnings:
                continue
            self.warnings[warning] = None
            if self.file:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(encode_json(warning._asdict()) + "\n")


def read_warnings(file: Path) -> list[Warned]:
    """Return the warnings of a file that ``WarningRecorder`` wrote; empty if there is none."""
    if not file.is_file():
        return []
    warnings = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            warnings.append(Warned(**json.loads(line)))
        except (ValueError, TypeError):  # half a line of a process that was killed
            continue
    return warnings


class Gathered(logging.Handler):
    """Keep warnings until ``flush``, which prints equal ones in one line.

    A run calls it as it begins and after each task, and the command as it ends.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pending: dict[str, list[Warned]] = {}  # by level
        self.all: dict[Warned, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        warning = Warned(record.getMessage(), place())
        self.pending.setdefault(record.levelname, []).append(warning)
        self.all[warning] = None

    def flush(self) -> None:
        pending, self.pending = self.pending, {}
        for level, warnings in pending.items():
            for line in warning_lines(warnings):
                tqdm.write(f"{level}: {line}", file=sys.stderr)  # above a progress bar, if any


@contextmanager
def gathered() -> Iterator[None]:
    """Gather warnings inside it; the rest is printed at its end, above any error."""
    handler, root = Gathered(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.flush()


def earlier_warnings() -> list[Warned]:
    """Return the warnings that the command has given so far."""
    handlers = logging.getLogger().handlers
    return [w for handler in handlers if isinstance(handler, Gathered) for w in handler.all]
