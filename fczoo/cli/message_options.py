"""Options that choose what a command prints on stderr."""

from collections.abc import Callable
from typing import Any

import click

from fczoo.cli.options import OUTPUT, Command, Name, grouped_option
from fczoo.core.messages import choose_message_style


def message_options() -> Callable[[Command], Command]:
    """Return the decorator that adds ``--quiet``, ``--verbose`` and ``--log-format``."""

    def choose(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and param.name:
            is_format = param.name == "log_format"
            choose_message_style(**{"json" if is_format else param.name: value in (True, "json")})

    def message_option(*names: str, **more: Any) -> Callable[[Command], Command]:
        return grouped_option(OUTPUT, *names, callback=choose, expose_value=False, **more)

    options = (
        message_option(
            "--quiet", is_flag=True, help="Print tables and errors only, no progress or warnings"
        ),
        message_option(
            "--verbose", is_flag=True, help="Print a line per round, too, of runs one after another"
        ),
        message_option(
            "--log-format",
            type=Name(["text", "json"]),
            help="Format of the lines on stderr: text, or a JSON object per line, without bars  "
            "[default: text]",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
