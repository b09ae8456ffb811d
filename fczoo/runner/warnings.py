"""Warnings of a command: equal warnings become one line with their number and places."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from fczoo.core.command_messages import message_line
from fczoo.core.errors import current_place
from fczoo.core.files import encode_json
from fczoo.core.names import join_first_names

MAX_PLACES = 3  # most places in a line


class LocatedWarning(NamedTuple):
    """A warning and its place, such as a task or a client; the place may be empty."""

    text: str
    place: str


def warning_lines(warnings: Iterable[LocatedWarning]) -> list[str]:
    """Merge equal warnings into one line each, with their number and their first places."""
    places: dict[str, list[str]] = {}
    for warning in warnings:
        places.setdefault(warning.text, []).append(warning.place)
    return [f"{text}{_locations_text(locations)}" for text, locations in places.items()]


def _locations_text(places: list[str]) -> str:
    locations = list(dict.fromkeys(filter(None, places)))
    listing = join_first_names(locations, MAX_PLACES, "; ")
    times = f"{len(places)} times" if len(places) > 1 else ""
    about = ": ".join(filter(None, (times, listing)))
    return f" ({about})" if about else ""


class WarningRecorder(logging.Handler):
    """Record each distinct warning inside a ``with`` block, also in ``file`` if given.

    Warnings that the file already has are not repeated, since a resumed run may issue them again.
    A lower ``level`` also records other messages.
    """

    def __init__(self, file: Path | None = None, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.file = file
        self.warnings = dict.fromkeys(read_warnings(file) if file else ())

    def __enter__(self) -> "WarningRecorder":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(LocatedWarning(record.getMessage(), current_place()))

    def add(self, *warnings: LocatedWarning) -> None:
        """Record warnings as if they were issued now."""
        for warning in warnings:
            if warning in self.warnings:
                continue
            self.warnings[warning] = None
            if self.file:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(encode_json(warning._asdict()) + "\n")


def read_warnings(file: Path) -> list[LocatedWarning]:
    """Read the warnings of a file that ``WarningRecorder`` wrote; empty if it is missing."""
    if not file.is_file():
        return []
    warnings = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            warnings.append(LocatedWarning(**json.loads(line)))
        except (ValueError, TypeError):  # incomplete line of a killed process
            continue
    return warnings


class WarningCollector(logging.Handler):
    """Collect warnings until ``flush``, which prints equal ones as one line.

    A run calls ``flush`` at its start and after each task, a command at its end.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pending: dict[str, list[LocatedWarning]] = {}  # by level
        self.warnings: dict[LocatedWarning, None] = {}

    def __enter__(self) -> "WarningCollector":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        warning = LocatedWarning(record.getMessage(), current_place())
        self.pending.setdefault(record.levelname, []).append(warning)
        self.warnings[warning] = None

    def flush(self) -> None:
        pending, self.pending = self.pending, {}
        for level, warnings in pending.items():
            for line in warning_lines(warnings):
                if text := message_line("WARNING", line, label=level):
                    tqdm.write(text, file=sys.stderr)  # above a progress bar, if any


@contextmanager
def gather_warnings() -> Iterator[None]:
    """Collect warnings inside a ``with`` block; print the remaining ones at its end."""
    collector = WarningCollector()
    try:
        with collector:
            yield
    finally:
        collector.flush()


def earlier_warnings() -> list[LocatedWarning]:
    """Return the warnings that the command has issued so far."""
    handlers = logging.getLogger().handlers
    return [
        w for handler in handlers if isinstance(handler, WarningCollector) for w in handler.warnings
    ]
