"""The exception whose message is meant for users, and how it quotes other errors."""

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

OPTION = re.compile(r"(`[^`]*`|fczoo [a-z]+ [^;]*)|(?<![\w'\"-])--(set )?([a-z][a-z-]*)")
"""Commands, which messages quote unchanged, or options of the command line."""
LONGEST = 160  # characters of another error's message that are repeated


class FczooError(Exception):
    """An error that the user can correct. Its message is one line: what is wrong, where, and what to do."""

    exit_code = 1  # of the command line


def first_line(error: BaseException) -> str:
    """The first line of another error's message, at most about 160 characters, whole words; its type where
    it has none.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rpartition(' ')[0] or line[:LONGEST]} ..."


def named_as_in_python(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Decorate a function for users of Python: its errors name arguments in place of options."""

    @wraps(function)
    def called(*arguments: Arguments.args, **more: Arguments.kwargs) -> Returned:
        try:
            return function(*arguments, **more)
        except FczooError as error:
            error.args = (OPTION.sub(_argument, str(error)),)
            raise

    return called


def _argument(found: re.Match[str]) -> str:
    """Return the argument of an option: ``--batch-size`` -> ``batch_size``."""
    command, of_method, option = found.groups()
    if command or of_method:
        return command or option
    return "options" if option == "set" else option.replace("-", "_")
