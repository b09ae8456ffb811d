"""``fczoo bench --resume`` needs nothing else: the run folder knows its runs, FCZOO_HOME where files lay."""

import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from fczoo.cli.app import main


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished grid of two partitions on a folder of images, one of its runs taken away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    for place in [tmp_path / "images" / part / name for part in ("train", "test") for name in "abcd"]:
        place.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(place / f"{i}.png")
    (tmp_path / "weights").mkdir()
    shutil.copy(
        str(files("fczoo") / "assets" / "vit_nano_32.safetensors"), tmp_path / "weights" / "mine.safetensors"
    )
    given = (
        "--dataset imagefolder --data-root images --backbone weights/mine.safetensors --tasks 2 --clients 2"
    )
    grid = "--methods fedncm,fedridge --partition iid,quantity:1 --seeds 0,1 --rounds 1 --epochs 1"
    done = bench(*given.split(), *grid.split(), "--set", "fedncm.distance=cosine")
    assert done.exit_code == 0, done.output
    (out,) = (tmp_path / "results").iterdir()
    shutil.rmtree(out / "quantity_1" / "fedncm" / "seed1")
    return out


def bench(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


def test_the_newest_run_goes_on(begun: Path) -> None:
    done = bench("--resume")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("finished before, kept") == 7 and "fedncm seed 1: task 2 of 2" in done.stderr
    assert (begun / "quantity_1" / "fedncm" / "seed1" / "result.json").is_file()
    assert done.stdout.count("distance=cosine, other than by default") == 2
    assert not any(b"weights/mine" in p.read_bytes() for p in begun.rglob("*") if p.is_file())


def test_elsewhere_what_is_missing_is_said(
    begun: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "another"))
    there = begun.rename(tmp_path / "moved")
    assert "no weight file at mine.safetensors" in bench("--resume", "--out", str(there)).stderr
    given = ["--backbone", "weights/mine.safetensors", "--data-root", "images"]
    assert bench("--resume", "--out", str(there), *given).exit_code == 0


def test_a_list_of_settings_is_refused(begun: Path) -> None:
    done = bench("--resume", "--partition", "iid,shards:2")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "leave lists of others out" in done.stderr
    assert "no run to resume in nowhere" in bench("--resume", "--out", "nowhere").stderr
