"""Test the warning about settings without effect and the heading without them."""

from pathlib import Path

from click.testing import CliRunner

from fczoo.cli.app import main

SMALL = ["--train-per-class", "8", "--test-per-class", "4", "--tasks", "3", "--clients", "3"]


def bench(folder: Path, *words: str) -> tuple[list[str], str]:
    """Return the warnings about unused settings, and the heading."""
    result = CliRunner().invoke(main, ["bench", *words, *SMALL, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if "no effect" in line]
    return warnings, result.stdout.split("\n\n")[0]


def test_method_without_training_has_no_schedule(tmp_path: Path) -> None:
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
    warnings, heading = bench(tmp_path / "a", *words)
    assert len(warnings) == 1
    assert warnings[0].endswith(
        "fedncm, fedridge do not train: "
        "--rounds 5, --epochs 5, --drop-rate 0.1, --aggregator median have no effect"
    )
    for part in (
        "median",
        "rounds",
        "epochs",
        "batch",
        "augmentation",
        "participation",
        "drop rate",
    ):
        assert part not in heading
    assert "; no training; seeds 0" in heading
    assert "80 training (8 per class) and " in heading


def test_heading_has_schedule_if_any_method_trains(tmp_path: Path) -> None:
    words = [
        "--methods",
        "fedncm,fedavg",
        "--aggregator",
        "median",
        "--rounds",
        "1",
        "--epochs",
        "2",
    ]
    warnings, heading = bench(tmp_path / "b", *words)
    assert [line.partition("fedncm")[2] for line in warnings] == [
        " does not train: --rounds 1, --epochs 2, --aggregator median have no effect"
    ]
    assert "1 rounds x 2 epochs" in heading and "aggregator median" in heading


def test_plain_run_gives_no_warning(tmp_path: Path) -> None:
    assert bench(tmp_path / "c", "--methods", "fedncm")[0] == []


def test_missing_data_root_has_no_effect_on_bundled_data(tmp_path: Path) -> None:
    words = ["--methods", "fedncm", "--dataset", "digits", "--data-root"]
    (warning,), _ = bench(tmp_path / "missing", *words, str(tmp_path / "nowhere"))
    assert warning.endswith(
        "digits needs no data folder: --data-root nowhere, which does not exist, has no effect"
    )
    (tmp_path / "file").touch()
    (warning,), _ = bench(tmp_path / "wrong", *words, str(tmp_path / "file"))
    assert "--data-root file, which is not a folder, has no effect" in warning
    assert bench(tmp_path / "present", *words, str(tmp_path))[0] == []


def test_min_class_count_needs_class_statistics(tmp_path: Path) -> None:
    words = ["--methods", "fedavg,fedncm", "--rounds", "1", "--min-class-count", "2"]
    warnings, heading = bench(tmp_path / "both", *words)
    assert "class statistics of at least 2 images per class" in heading  # of fedncm
    _, heading = bench(tmp_path / "one", "--methods", "fedavg", *words[2:])
    assert "statistics of at least" not in heading
    assert any(
        line.endswith("fedavg uploads no class counts: --min-class-count 2 has no effect")
        for line in warnings
    )
