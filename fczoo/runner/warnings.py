"""Warnings on the terminal: equal ones are one line, with how often and where."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from fczoo.core.place import place

NAMED = 3  # places that a line names


@dataclass
class _Told:
    level: str
    text: str
    places: list[str] = field(default_factory=list)

    def line(self) -> str:
        named = list(dict.fromkeys(filter(None, self.places)))
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        where = f"{'; '.join(named[:NAMED])}{more}"
        times = f"{len(self.places)} times" if len(self.places) > 1 else ""
        about = ": ".join(filter(None, (times, where)))
        return f"{self.level}: {self.text}{f' ({about})' if about else ''}"


class Gathered(logging.Handler):
    """Keeps warnings until ``flush``, which a run calls as it begins and after each task, and the command
    as it ends.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: dict[str, _Told] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.told.setdefault(text, _Told(record.levelname, text)).places.append(place())

    def flush(self) -> None:
        told, self.told = self.told, {}
        for warning in told.values():
            tqdm.write(warning.line(), file=sys.stderr)  # above a progress bar, where there is one


@contextmanager
def gathered() -> Iterator[None]:
    """Inside it, warnings are gathered; what is left is told at its end, above any error."""
    handler, root = Gathered(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.flush()
