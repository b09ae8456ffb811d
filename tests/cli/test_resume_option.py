"""Test ``fczoo bench --resume`` without other options.

The run folder stores the runs, and FCZOO_HOME stores the paths of the files.
"""

import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from fczoo.cli.app import main


@pytest.fixture
def incomplete_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Finish a grid of two partitions on a folder of images, then remove one of its runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    for class_folder in [
        tmp_path / "images" / part / name for part in ("train", "test") for name in "abcd"
    ]:
        class_folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(
                class_folder / f"{i}.png"
            )
    (tmp_path / "weights").mkdir()
    shutil.copy(
        str(files("fczoo") / "assets" / "vit_nano_32.safetensors"),
        tmp_path / "weights" / "mine.safetensors",
    )
    options = (
        "--dataset imagefolder --data-root images --backbone weights/mine.safetensors --tasks 2 "
        "--clients 2"
    )
    grid = "--methods fedncm,fedridge --partition iid,quantity:1 --seeds 0,1 --rounds 1 --epochs 1"
    outcome = bench(*options.split(), *grid.split(), "--set", "fedncm.distance=cosine")
    assert outcome.exit_code == 0, outcome.output
    (out,) = (tmp_path / "results").iterdir()
    shutil.rmtree(out / "quantity_1" / "fedncm" / "seed1")
    return out


def bench(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


def test_newest_run_resumes_without_other_options(incomplete_run: Path) -> None:
    outcome = bench("--resume")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr.count("already finished, skipped") == 7
    assert "fedncm seed 1: task 2 of 2" in outcome.stderr
    assert (incomplete_run / "quantity_1" / "fedncm" / "seed1" / "result.json").is_file()
    assert outcome.stdout.count("distance=cosine, set by the user") == 2
    assert not any(
        b"weights/mine" in p.read_bytes() for p in incomplete_run.rglob("*") if p.is_file()
    )


def test_moved_run_reports_missing_weight_file(
    incomplete_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "another"))
    folder = incomplete_run.rename(tmp_path / "moved")
    assert "no weight file at mine.safetensors" in bench("--resume", "--out", str(folder)).stderr
    options = ["--backbone", "weights/mine.safetensors", "--data-root", "images"]
    assert bench("--resume", "--out", str(folder), *options).exit_code == 0


def test_resume_rejects_list_of_settings(incomplete_run: Path) -> None:
    outcome = bench("--resume", "--partition", "iid,shards:2")
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    assert "leave out lists of values" in outcome.stderr
    assert "no run to resume in nowhere" in bench("--resume", "--out", "nowhere").stderr
