"""Test ``--vary``: parts that the seeds of a bench change in addition to training."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main

TINY = ["--methods", "fedncm", "--seeds", "0,1", "--train-per-class", "20", "--test-per-class", "5"]


def bench(out: Path, *options: str) -> str:
    """Run a bench with seeds 0 and 1; return what it prints."""
    outcome = CliRunner().invoke(main, ["bench", *TINY, *options, "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def run_record(out: Path, seed: int) -> dict:
    """Read ``bench.json`` of one seed."""
    return json.loads((out / f"seed{seed}" / "bench.json").read_text())


def test_every_seed_has_different_partition_and_class_order(tmp_path):
    text = bench(tmp_path / "runs", "--vary", "class-order,partition")
    assert "seeds 0, 1 of the methods' draws, partition and class order" in text
    assert "class order drawn per seed" in text
    assert "(drawn per seed)" in text
    assert text.count("\nfedncm ") == 1  # both seeds in one row
    for seed in (0, 1):
        settings = run_record(tmp_path / "runs", seed)["settings"]
        assert settings["partition_seed"] == settings["class_order_seed"] == seed
    hashes = {run_record(tmp_path / "runs", seed)["partition"]["sha256"] for seed in (0, 1)}
    assert len(hashes) == 2


def test_varied_run_matches_run_with_same_seeds(tmp_path):
    bench(tmp_path / "varied", "--vary", "training,partition")
    bench(tmp_path / "plain", "--seeds", "1", "--partition-seed", "1")
    seed_run = json.loads(
        (tmp_path / "varied" / "seed1" / "fedncm" / "seed1" / "result.json").read_text()
    )
    plain = json.loads((tmp_path / "plain" / "fedncm" / "seed1" / "result.json").read_text())
    assert seed_run["accuracy"] == plain["accuracy"]


def test_vary_defaults_to_training(tmp_path):
    assert "seeds 0, 1 of the methods' draws only" in bench(tmp_path / "runs")
    assert (tmp_path / "runs" / "bench.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vary", "colour"), "--vary"),
        (("--vary", "partition", "--partition-seed", "5"), "--partition-seed is given"),
        (("--vary", "class-order", "--class-order", "9,8,7,6,5,4,3,2,1,0"), "--vary class-order"),
        (("--vary", "partition", "--partition", "file:split.json"), "--vary partition"),
    ],
)
def test_invalid_vary_is_rejected(tmp_path, options, message):
    outcome = CliRunner().invoke(main, ["bench", *TINY, *options, "--out", str(tmp_path / "runs")])
    assert outcome.exit_code != 0
    assert message in outcome.output
    assert len(outcome.output.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
