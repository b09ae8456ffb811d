"""Test that commands on pages exist, with their options and methods."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from fczoo.cli.app import main
from fczoo.core.registry import METHODS

ROOT = Path(__file__).parents[2]
WRITTEN_BY_HAND = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in WRITTEN_BY_HAND if page.stem not in ("commands", "settings")]
BLOCK = re.compile(r"^```(?:bash|console)?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|^\$ |&& )(fczoo (?:(?!&&)[^#\n])*)", flags=re.MULTILINE)
PLACEHOLDERS = ("all", "mine", "NAME", "NAMES")
SETTING = re.compile(r"(\w+)\.(\w+)=")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command in the blocks of a page."""
    blocks = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    return [shlex.split(line) for line in COMMAND.findall(blocks.replace("\\\n", " "))]


def problem(words: list[str]) -> str:
    """Return the problem of a command, or an empty string."""
    command: click.Command = main
    arguments = words[1:]
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    if command.name == "reproduce":  # it passes options to bench
        options |= {o for p in main.commands["bench"].params for o in p.opts}
    given_options = [
        argument.partition("=")[0] for argument in arguments if argument.startswith("--")
    ]
    unknown = [option for option in given_options if option not in options]
    if unknown:
        return f"no option {unknown[0]}"
    return "" if "suite" in words else _problem_of_methods(arguments)  # rows of suites have names


def _problem_of_methods(words: list[str]) -> str:
    for option, value in itertools.pairwise(words):
        if option in ("--methods", "--rows"):
            names = [name for name in value.split(",") if name not in PLACEHOLDERS]
            if unknown := [name for name in names if METHODS.find(name) is None]:
                return f"no method {unknown[0]}"
        if option == "--set" and (match := SETTING.match(value)):
            method, field = match.groups()
            if METHODS.find(method) and field not in METHODS.options(METHODS.find(method)):
                return f"{method} has no option {field}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_page_exist(page: Path) -> None:
    problems = {shlex.join(words): problem(words) for words in commands(page)}
    assert not {line: text for line, text in problems.items() if text}


def test_pages_contain_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 80


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("fczoo train", "no command train"),
        ("fczoo bench --lr 1", "no option --lr"),
        ("fczoo bench --methods hgp,hpg", "no method hpg"),
        ("fczoo bench --set hgp.rate=1", "hgp has no option rate"),
        ("fczoo bench --methods hgp --set hgp.lr=0.1", ""),
    ],
)
def test_invalid_command_is_detected(line: str, text: str) -> None:
    assert problem(line.split()) == text
