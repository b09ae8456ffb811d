"""Command-line options: those of ``Settings``, made from its fields, and their headings in ``--help``."""

from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from fczoo.cli.pointers import check_spaces
from fczoo.core.names import match
from fczoo.core.options import describe_type, flag
from fczoo.core.registry import Registry
from fczoo.data.dataset import Defaults
from fczoo.federation.settings import GROUPS, Settings
from fczoo.federation.spelling import REGISTERED
from fczoo.reports.words import option_word

Command = TypeVar("Command", bound=Callable[..., Any])

RUNS, OUTPUT = "runs", "output"  # headings of options that are no settings


def normalized(token: str) -> str:
    """Return an option or a command as it is spelled here: ``batch_size`` -> ``batch-size``."""
    return token.lower().replace("_", "-")


CONTEXT = {"token_normalize_func": normalized, "max_content_width": 120}


class Name(click.Choice[str]):
    """One of a few names, matched without regard to case, ``-`` and ``_``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found: str = super().convert(match(str(value), self.choices) or value, param, ctx)
        return found


class GroupedOption(click.Option):
    """An option that ``--help`` lists below a heading."""

    def __init__(self, *arguments: Any, group: str = "options", **more: Any):
        super().__init__(*arguments, **more)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists options below headings."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.context_settings = {**CONTEXT, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if advice := check_spaces(args):
            raise click.UsageError(advice, ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(getattr(param, "group", "options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading.capitalize()):
                formatter.write_dl(records)


def grouped(group: str, *names: str, **more: Any) -> Callable[[Command], Command]:
    """``click.option`` below a heading."""
    return click.option(*names, cls=GroupedOption, group=group, **more)


def settings_options(names: Iterable[str] = ()) -> Callable[[Command], Command]:
    """Decorator that adds the options of ``Settings``, or some of them, by group.

    Their words are read by ``Settings``.
    """
    wanted = [f for f in fields(Settings) if not names or f.name in names]

    def add(command: Command) -> Command:
        ordered = [f for group in GROUPS for f in wanted if f.metadata["group"] == group]
        for field in reversed(ordered):
            command = _setting(field)(command)
        return command

    return add


def _setting(field: Field[Any]) -> Callable[[Command], Command]:
    hint, name = get_type_hints(Settings)[field.name], flag(field.name)
    default = option_word(field.default)
    if field.name in {f.name for f in fields(Defaults)}:
        default = "by data set"
    more: dict[str, Any] = {"help": field.metadata["meaning"], "default": None}
    if hint is bool:
        name = f"{name}/--no-{name.removeprefix('--')}"
    else:
        more["help"] += "" if default == "none" else f"  [{default}]"
        more["metavar"] = describe_type(hint).replace(" | none", "").replace(" ", "")
        more["shell_complete"] = complete(REGISTERED.get(field.name), _choices(hint))
    return grouped(field.metadata["group"], name, **more)


def _choices(hint: Any) -> tuple[str, ...]:
    """The words among an option's values."""
    parts = (hint, *get_args(hint))
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))


def complete(registry: Registry[Any] | None, words: tuple[str, ...] = ()) -> Callable[..., list[str]]:
    """What a shell offers for the last word of a comma-separated list. Nothing is imported to find names."""

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = [*words, *(registry.names() if registry else ())]
        return [f"{before}{comma}{word}" for word in known if word.startswith(last)]

    return offer
