"""Options for the messages of a command on stderr."""

from collections.abc import Callable
from typing import Any

import click

from fczoo.cli.options import OUTPUT, Command, Name, grouped_option
from fczoo.core.command_messages import choose_message_style, has_colours, message_line


def print_error(text: str) -> None:
    """Print an error on stderr, in the style of messages.

    Args:
        text: What is wrong, where, and what to do.
    """
    click.echo(message_line("ERROR", text), err=True, color=has_colours())


def message_options() -> Callable[[Command], Command]:
    """Return the decorator that adds ``--quiet``, ``--verbose`` and ``--log-format``."""

    def message_option(name: str, field: str, trigger: Any = True, **more: Any) -> Any:
        """Return an option that sets a field of ``MessageStyle`` if its value is ``trigger``."""

        def choose(ctx: click.Context, param: click.Parameter, value: Any) -> None:
            if value == trigger:
                choose_message_style(**{field: True})

        return grouped_option(OUTPUT, name, callback=choose, expose_value=False, **more)

    options = (
        message_option(
            "--quiet",
            "quiet",
            is_flag=True,
            help="Print only tables and errors, no progress or warnings",
        ),
        message_option(
            "--verbose",
            "verbose",
            is_flag=True,
            help="Also print a line per round, if runs execute one after another",
        ),
        message_option(
            "--log-format",
            "json",
            trigger="json",
            type=Name(["text", "json"]),
            help="Format of the lines on stderr: text, or a JSON object per line without progress "
            "bars  [default: text]",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
