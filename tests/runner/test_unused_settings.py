"""What has no effect is said in one line and left out of the heading."""

from pathlib import Path

from click.testing import CliRunner

from fczoo.cli.app import main

SMALL = ["--train-per-class", "8", "--test-per-class", "4", "--tasks", "3", "--clients", "3"]


def bench(folder: Path, *words: str) -> tuple[list[str], str]:
    """The warnings about unused settings, and the heading."""
    done = CliRunner().invoke(main, ["bench", *words, *SMALL, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    said = [line for line in done.stderr.splitlines() if "no effect" in line]
    return said, done.stdout.split("\n\n")[0]


def test_a_method_without_training_has_no_schedule(tmp_path: Path) -> None:
    words = [
        "--methods",
        "fedncm,fedridge",
        "--aggregator",
        "median",
        "--rounds",
        "5",
        "--epochs",
        "5",
        "--drop-rate",
        "0.1",
    ]
    said, heading = bench(tmp_path / "a", *words)
    assert len(said) == 1 and said[0].endswith(
        "fedncm, fedridge do not train: "
        "--rounds 5, --epochs 5, --drop-rate 0.1, --aggregator median have no effect"
    )
    for word in ("median", "rounds", "epochs", "batch", "augmentation", "participation", "drop rate"):
        assert word not in heading
    assert "; no training; seeds 0" in heading


def test_beside_a_method_that_trains_the_heading_has_the_schedule(tmp_path: Path) -> None:
    words = ["--methods", "fedncm,fedavg", "--aggregator", "median", "--rounds", "1", "--epochs", "2"]
    said, heading = bench(tmp_path / "b", *words)
    assert [line.partition("fedncm")[2] for line in said] == [
        " does not train: --rounds 1, --epochs 2, --aggregator median have no effect"
    ]
    assert "1 rounds x 2 epochs" in heading and "aggregator median" in heading


def test_nothing_is_said_of_a_plain_run(tmp_path: Path) -> None:
    assert bench(tmp_path / "c", "--methods", "fedncm")[0] == []
