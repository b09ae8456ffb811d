"""Messages of a command on stderr: their level, format and colour."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

from fczoo.core.files import encode_json
from fczoo.core.terminal import is_terminal

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
COLOURS: dict[Level, int] = {"WARNING": 33, "ERROR": 31}
"""Level -> number of its colour on a terminal; progress has none."""


@dataclass(frozen=True)
class MessageStyle:
    """Choice of the messages that a command prints on stderr."""

    quiet: bool = False  # errors only
    verbose: bool = False  # a line per round, too
    json: bool = False  # an object per line

    @property
    def has_bars(self) -> bool:
        """Return whether progress bars may be drawn."""
        return not (self.quiet or self.json)


DEFAULT_STYLE = MessageStyle()
_style: ContextVar[MessageStyle] = ContextVar("style of messages", default=DEFAULT_STYLE)


def message_style() -> MessageStyle:
    """Return the style of messages that the command has chosen."""
    return _style.get()


def choose_message_style(**choices: bool) -> None:
    """Change fields of the style of messages, up to the end of ``use_message_style``.

    Args:
        **choices: Fields of ``MessageStyle`` and their values.
    """
    _style.set(replace(_style.get(), **choices))


@contextmanager
def use_message_style(style: MessageStyle) -> Iterator[None]:
    """Use a style of messages inside the context.

    Args:
        style: Style to use.
    """
    token = _style.set(style)
    try:
        yield
    finally:
        _style.reset(token)


def message_line(level: Level, text: str, label: str | None = None) -> str | None:
    """Return the line of a message in the chosen style; None if it is not printed.

    Args:
        level: Level of the message: DEBUG for rounds, INFO for progress.
        text: Text of the message.
        label: Word before the text. Default: ``Error`` or ``WARNING``, none for progress.
    """
    style = message_style()
    if (style.quiet and level != "ERROR") or (level == "DEBUG" and not style.verbose):
        return None
    if style.json:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return encode_json({"time": now, "level": level, "message": text})
    label = label or {"ERROR": "Error", "WARNING": "WARNING"}.get(level)
    prefix = f"{label}: " if label else ""
    if prefix and level in COLOURS and has_colours():
        prefix = f"\x1b[{COLOURS[level]}m{prefix.rstrip()}\x1b[0m "
    return prefix + text


def has_colours() -> bool:
    """Return whether stderr gets colours.

    It does on a terminal, unless ``NO_COLOR`` is set and not empty, and anywhere with
    ``FORCE_COLOR``; of the two, ``NO_COLOR`` takes precedence.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(sys.stderr)
