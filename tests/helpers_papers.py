"""Tools of the tests of papers and cards: the command, recorded results, settings of a paper."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.papers.reproduce import get_card
from fczoo.reports import archive

CARD = "hgp/cifar100/dirichlet:0.05"
B16 = "vit_base_patch16_224.augreg_in21k"


def output_of(*arguments: str, code: int = 0) -> str:
    """Run a command; return what it prints.

    Args:
        arguments: Words of the command.
        code: The exit code that it must have.
    """
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == code, outcome.output
    return outcome.output


def write_archive(place: Path, source: Path, *folders: str) -> Path:
    """Write an archive with some rows of another.

    Args:
        place: Folder of the archive.
        source: The other archive.
        folders: Run folders, as that archive names them.

    Returns:
        Path of the archive.
    """
    archive.write_archive(
        [runs for runs in archive.read_archive(source) if runs.name in folders],
        place / "results.csv",
    )
    return place / "results.csv"


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def paper_settings(which: int = 0, **changes: object) -> dict:
    """Return settings of a run on CIFAR-100 as HGP's print has them.

    Args:
        which: 0 for the print, 1 for the released code.
        changes: Settings with other values.
    """
    settings = get_card(CARD).readings[which].config.settings
    return {k: v for k, v in {**as_json(settings.portable()), **changes}.items() if k != "backbone"}


def paper_options(which: int = 0, **changes: object) -> dict:
    """Return the options of the method as ``paper_settings`` returns the settings."""
    return as_json({**get_card(CARD).readings[which].options, **changes})
