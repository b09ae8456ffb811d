"""Test commands on a user's image folder and their remarks."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from fczoo.cli.app import main

LEAK = "imagefolder: 3 test images are also training images"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two classes of four training images each.

    Three of the four test images are training images.
    """
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    rng, root = np.random.default_rng(0), tmp_path / "images"
    for name in ("=1+1", "cat"):
        for part, count in (("train", 4), ("test", 2)):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    for file in ("=1+1/0.png", "=1+1/1.png", "cat/0.png"):
        shutil.copy(root / "train" / file, root / "test" / file)
    return root


def test_shared_images_are_reported_at_start_and_below_table(folder: Path, tmp_path: Path) -> None:
    options = [
        "--data-root",
        str(folder),
        "--backbone",
        "vit_nano_32",
        "--out",
        str(tmp_path / "run"),
    ]
    tasks = ["--tasks", "2", "--clients", "2", "--partition", "iid", "--stored-size", "32"]
    command = ["bench", "--methods", "fedncm", "--dataset", "imagefolder", *options, *tasks]
    outcome = CliRunner().invoke(main, command)
    assert outcome.exit_code == 0, outcome.output
    assert f"WARNING: {LEAK}\n" in outcome.stderr
    assert f"\n{LEAK}\n" in outcome.stdout
    assert (
        " training (at most 20 per class) and " in outcome.stdout
    )  # quick's limit; there are fewer
    about = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert about["data"]["remarks"] == [LEAK]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"] == [LEAK]
    assert LEAK in (tmp_path / "run" / "summary.csv").read_text()
    assert outcome.stdout.count(LEAK) == 1
    archive = tmp_path / "runs.csv"
    for arguments, says in (
        ([str(tmp_path / "run"), "--archive"], "written to"),
        ([], f"\n{LEAK}\n"),
    ):
        again = CliRunner().invoke(main, ["report", *arguments, str(archive)])
        assert again.exit_code == 0 and says in again.stdout, again.output


def test_formula_like_class_name_is_quoted_in_csv(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "split.csv"
    options = ["--data-root", str(folder), "--tasks", "2", "--clients", "1", "--table", str(table)]
    outcome = CliRunner().invoke(main, ["partition", "--dataset", "imagefolder", *options])
    assert outcome.exit_code == 0, outcome.output
    rows = list(csv.DictReader(table.open(encoding="utf-8", newline="")))
    assert [(row["name"], row["images"]) for row in rows] == [("'=1+1", "4"), ("cat", "4")]
