"""Words of the command line that several tests share."""

import shlex

from click.testing import CliRunner

from fczoo.cli.app import main

TINY = shlex.split(
    "--train-per-class 8 --test-per-class 4 --rounds 1 --epochs 1 --tasks 3 --clients 3"
)
"""A run on digits in a second or two."""


def run(*arguments: str) -> str:
    """Run a command that must succeed; return what it prints."""
    outcome = CliRunner().invoke(main, list(arguments))
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout
