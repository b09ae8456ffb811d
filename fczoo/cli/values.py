"""Checks of command-line values that click omits, and types of numbers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fczoo.core.errors import FczooError


class Number(click.FloatRange):
    """Type of a finite number within limits; unlike click's, it rejects ``nan``."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class WholeNumber(click.IntRange):
    """Type of a whole number within limits."""

    name = "whole number"


def check_not_empty(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Check that no value is empty, which click would accept as the current folder or as a name.

    Args:
        command: The command.
        ctx: Its context.
        args: Its arguments.

    Raises:
        click.UsageError: A value is empty.
    """
    values, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    for param in command.get_params(ctx):
        if param.type is not click.UNPROCESSED and _has_empty(values.get(param.name or "")):
            name = param.opts[0] if isinstance(param, click.Option) else (param.name or "").upper()
            advice = "" if param.required else " or leave it out"
            raise click.UsageError(f"{name} is empty; give it a value{advice}", ctx)


def _has_empty(values: Any) -> bool:
    """Return whether a value, or one of several, is an empty text."""
    entries = values if isinstance(values, list | tuple) else [values]
    return any(isinstance(entry, str) and not entry.strip() for entry in entries)


def check_suffix(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Check that an output file has one of the suffixes of its format.

    Args:
        option: Name of the option, for messages.
        path: The file.
        suffixes: Allowed suffixes.

    Raises:
        FczooError: The file has another suffix.
    """
    if path.suffix.lower() not in suffixes:
        raise FczooError(f"{option} {path} must end with {' or '.join(suffixes)}")
