"""``--help`` shows whole sentences, examples first, and the types of values in words."""

import re

import click
import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.cli.examples import COMMAND_GROUPS, COMMON, EXAMPLES


def page(*words: str, flag: str = "--help", width: int = 80) -> str:
    """Return a page of help at a width of the terminal."""
    done = CliRunner().invoke(main, [*words, flag], terminal_width=width)
    assert done.exit_code == 0, done.output
    return done.stdout


def every_command() -> dict[str, click.Command]:
    """Return all commands by the words that reach them."""
    found = {}
    for name, command in main.commands.items():
        found[name] = command
        for inner, below in getattr(command, "commands", {}).items():
            found[f"{name} {inner}"] = below
    return found


def test_every_command_stands_in_one_group() -> None:
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(main.commands)
    text = page()
    assert "..." not in text.partition("Start here:")[2]
    places = [text.index(f"\n{heading}:\n") for heading in COMMAND_GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("words", every_command())
def test_help_begins_with_examples(words: str) -> None:
    command = every_command()[words]
    examples = EXAMPLES[str(command.name)]
    text = page(*words.split())
    assert text.index("Examples:") < text.index("Options:")
    for typed, _ in examples:
        assert typed.startswith(f"fczoo {words.split()[0]}") and typed in text


@pytest.mark.parametrize("words", every_command())
def test_no_page_shows_a_type_of_python_or_click(words: str) -> None:
    types = r"^  (-\w, )?--[a-z-]+ (int|float|str|INTEGER|FLOAT|TEXT|PATH|FILENAME|DIRECTORY)\b"
    assert not re.search(types, page(*words.split(), width=400), re.M)


def test_types_of_bench_are_words() -> None:
    text = page("bench", flag="--help-all", width=400)
    for option in ("--rounds NUMBER ", "--dataset NAMES ", "--data-root FOLDER ", "--config FILE "):
        assert option in text
    assert not re.search(r"--[a-z-]+ (int|float|str|INTEGER|TEXT|PATH)\b", text)
    assert "Number of local epochs per round  [default: set by the data set]" in text
    assert "Number of new clients at each later task  [default: 0]" in text


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_long_commands_show_common_options_first(name: str) -> None:
    """``bench --help`` had 172 lines; it names the page with all options, which adds the others."""
    short, whole = page(name), page(name, flag="--help-all")
    options = {param.opts[0] for param in main.commands[name].params}
    shown, listed = (set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for text in (short, whole))
    assert len(short.splitlines()) < 110
    assert shown - {"--help"} == options & {*COMMON, "--help-all"}
    assert listed == options
    hidden = len(options - shown)
    assert short.endswith(f"{hidden} more options: fczoo {name} --help-all\n")
    assert "more options" not in whole


def test_other_commands_show_all_options() -> None:
    assert "--class-order-seed" in page("partition") and "--help-all" not in page("partition")
