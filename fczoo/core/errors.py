"""Errors that the user can correct, and the place in a run that log messages name."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
ReturnType = TypeVar("ReturnType")

OPTION = re.compile(r"(`[^`]*`|fczoo [a-z]+ [^;]*)|(?<![\w'\"-])--(set )?([a-z][a-z-]*)")
"""Commands, which messages quote unchanged, or options of the command line."""
_OPTIONS = ContextVar("_OPTIONS", default=False)
"""Whether messages name options: in the command line, and inside a function that renames them."""
MAX_MESSAGE_CHARACTERS = 160  # characters of another error's message that are repeated
MAX_ERROR_CHARACTERS = 2000  # characters of a whole message: names in it may come from outside

MEMORY_SIGNS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory"),
    "could not create a primitive",  # all that oneDNN says when an allocation fails
)
NOT_LOADED = "failed to map segment from shared object"  # of a library that memory is too small for
OUT_OF_MEMORY = "out of memory; lower --together, --batch-size or --precision"


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that memory is used up."""
    message = str(error).lower()
    if isinstance(error, ImportError):
        return NOT_LOADED in message
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in message for sign in MEMORY_SIGNS)
    )


def printable(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return text from outside as one line that is safe to print, store and encode.

    Line breaks and tabs become spaces, lone surrogates become replacement characters. Characters
    that control a terminal or the direction of text are removed. A longer line is cut after a word.

    Args:
        text: Text of another party, such as a file's name or the reason of a refusal.
        limit: Largest number of characters that are kept.
    """
    line = text[: limit + 1]
    if not line.isprintable():
        line = "".join(map(_printable_character, line))
    return line if len(text) <= limit else f"{line[:limit].rpartition(' ')[0] or line[:limit]} ..."


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return "\ufffd" if "\ud800" <= character <= "\udfff" else ""


class LogFile(logging.FileHandler):
    """A log file that drops lines when the disk is full; the run's other files report that."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written to disk."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            super().close()


class FczooError(Exception):
    """An error that the user can correct.

    Its message is one line: what is wrong, where, and what to do.
    """

    exit_code = 1  # of the command line

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), MAX_ERROR_CHARACTERS))


class TooFewUploadsError(FczooError):
    """A round has fewer uploads than an aggregator needs to withstand hostile clients."""


class DivergedError(FczooError):
    """A value of the server's state is not finite."""


class InterruptedCommandError(FczooError):
    """A signal stopped the command; its finished results are on disk."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number  # as shells report it


def first_line(error: BaseException) -> str:
    """Return the first line of another error's message, shortened to about 160 characters.

    It ends with a whole word.

    Args:
        error: Any exception; the name of its type replaces an empty message.
    """
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


@contextmanager
def options_in_messages() -> Iterator[None]:
    """Keep command-line options in error messages, for commands and their workers."""
    token = _OPTIONS.set(True)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def use_python_names(function: Callable[Arguments, ReturnType]) -> Callable[Arguments, ReturnType]:
    """Decorate a function for users of Python: its errors name arguments instead of options.

    Inside ``options_in_messages`` errors do not change.

    Args:
        function: Function that may raise FczooError.
    """

    @wraps(function)
    def wrapper(*arguments: Arguments.args, **more: Arguments.kwargs) -> ReturnType:
        if _OPTIONS.get():
            return function(*arguments, **more)
        try:
            with options_in_messages():
                return function(*arguments, **more)
        except FczooError as error:
            error.args = (OPTION.sub(_argument, str(error)),)
            raise

    return wrapper


def _argument(option_match: re.Match[str]) -> str:
    """Return the argument of an option: ``--batch-size`` -> ``batch_size``."""
    command, of_method, option = option_match.groups()
    if command or of_method:
        return command or option
    return "options" if option == "set" else option.replace("-", "_")


_place: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def log_place(place: str) -> Iterator[None]:
    """Attribute log messages inside the context to a place of the run.

    Args:
        place: Place, such as a task or a client.
    """
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def current_place() -> str:
    """Return the place of the innermost ``log_place``; empty outside."""
    return _place.get()


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Silence fczoo's warnings inside the context, where they repeat or concern random cases."""
    log = logging.getLogger("fczoo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
