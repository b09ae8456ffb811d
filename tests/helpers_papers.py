"""What the tests of papers and cards share: the command, recorded results, settings of a paper."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fczoo import create_method
from fczoo.cli.app import main
from fczoo.papers.printed import get_paper
from fczoo.papers.reproduce import get_card

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


def followed(**changes: object) -> dict:
    """Settings of a run that follows HGP's protocol on CIFAR-100."""
    settings = get_paper("hgp").settings(get_card(CARD).numbers[0])
    return {k: v for k, v in {**as_json(settings.portable()), **changes}.items() if k != "backbone"}


def reading(**changes: object) -> dict:
    settings = get_paper("hgp").settings(get_card(CARD).numbers[0])
    return as_json(asdict(create_method("hgp", "cifar100", **{**settings.method_options("hgp"), **changes})))
