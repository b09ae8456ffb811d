"""Test the help pages: examples, plain value types and common options."""

import re

import click
import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.cli.options import COMMAND_GROUPS, COMMON_OPTIONS, EXAMPLES


def page(*words: str, flag: str = "--help", width: int = 80) -> str:
    """Return a page of help at a width of the terminal."""
    outcome = CliRunner().invoke(main, [*words, flag], terminal_width=width)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def every_command() -> dict[str, click.Command]:
    """Return all commands by their command line."""
    commands = {}
    for name, command in main.commands.items():
        commands[name] = command
        for inner, below in getattr(command, "commands", {}).items():
            commands[f"{name} {inner}"] = below
    return commands


def test_every_command_is_in_one_help_group() -> None:
    command_names = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(command_names) == sorted(main.commands)
    text = page()
    assert "..." not in text.partition("Start here:")[2]
    places = [text.index(f"\n{heading}:\n") for heading in COMMAND_GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("words", every_command())
def test_help_shows_examples_before_options(words: str) -> None:
    examples = EXAMPLES[words]
    text = page(*words.split())
    assert text.index("Examples:") < text.index("Options:")
    for example, _ in examples:
        assert example.startswith(f"fczoo {words.split()[0]}")
        assert example in text


@pytest.mark.parametrize("words", every_command())
def test_help_shows_no_python_or_click_types(words: str) -> None:
    types = r"^  (-\w, )?--[a-z-]+ (int|float|str|INTEGER|FLOAT|TEXT|PATH|FILENAME|DIRECTORY)\b"
    assert not re.search(types, page(*words.split(), width=400), re.M)


def test_bench_help_shows_plain_value_types() -> None:
    text = page("bench", flag="--help-all", width=400)
    for option in ("--rounds NUMBER ", "--dataset NAME ", "--data-root FOLDER ", "--config FILE "):
        assert option in text
    assert not re.search(r"--[a-z-]+ (int|float|str|INTEGER|TEXT|PATH)\b", text)
    assert "Number of local epochs per round  [default: set by the data set]" in text
    assert "Number of new clients at each later task  [default: 0]" in text


@pytest.mark.parametrize("name", ["bench", "partition"])
def test_help_calls_clients_shares_partition(name: str) -> None:
    """Use the glossary's words: a split divides a data set into training and test images."""
    text = page(name, flag="--help" if name == "partition" else "--help-all", width=400)
    assert "--partition NAME  Partition of images over clients: iid, dirichlet:0.5," in re.sub(
        " {2,}", "  ", text
    )
    assert not re.search(r"\bsplit\b", text.partition("Options:")[0], re.IGNORECASE)


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_help_of_long_commands_shows_common_options_only(name: str) -> None:
    """Show only common options in ``--help``, and point to ``--help-all``.

    ``bench --help`` had 172 lines.
    """
    short, full_page = page(name), page(name, flag="--help-all")
    options = {param.opts[0] for param in main.commands[name].params}
    short_options, full_options = (
        set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for text in (short, full_page)
    )
    assert len(short.splitlines()) < 110
    assert short_options - {"--help"} == options & {*COMMON_OPTIONS, "--help-all"}
    assert full_options - {"--help"} == options
    hidden = len(options - short_options)
    assert short.endswith(f"{hidden} more options: fczoo {name} --help-all\n")
    assert "more options" not in full_page


def test_help_of_other_commands_shows_all_options() -> None:
    assert "--class-order-seed" in page("partition")
    assert "--help-all" not in page("partition")
