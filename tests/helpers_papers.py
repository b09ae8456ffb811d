"""What the tests of papers and cards share: the command, recorded results, settings of a paper."""

import csv
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.papers.cards import get_card

RESULTS = Path(__file__).parents[1] / "results"
CARD = "hgp/cifar100/dirichlet:0.05"
B16 = "vit_base_patch16_224.augreg_in21k"


def printed(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code, done.output
    return done.output


def recorded(place: Path, *folders: str) -> Path:
    """An archive with the rows of some run folders of the repository's results."""
    with (RESULTS / "results.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        with (place / "results.csv").open("w", newline="") as out:
            writer = csv.DictWriter(out, rows.fieldnames or [], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row in rows if row["folder"] in folders)
    return place / "results.csv"


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def followed(which: int = 0, **changes: object) -> dict:
    """Settings of a run as HGP's print has them on CIFAR-100 or, with 1, as its released code does."""
    settings = get_card(CARD).readings[which].settings
    return {k: v for k, v in {**as_json(settings.portable()), **changes}.items() if k != "backbone"}


def reading(which: int = 0, **changes: object) -> dict:
    """The same for the method's options."""
    return as_json({**get_card(CARD).readings[which].options, **changes})
