"""Test warnings of schedules far below the one that a method was tuned for."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.federation.settings import Settings
from fczoo.reports.run_config import configure_run
from fczoo.runner.schedule_warnings import steps, warn_of_short_schedules
from helpers_cli import TINY


def schedule_warnings(out: Path, *more: str) -> list[str]:
    result = CliRunner().invoke(
        main, ["bench", "--methods", "hgp,fedncm", "--out", str(out), *TINY, *more]
    )
    assert result.exit_code == 0, result.output
    return [line for line in result.stderr.splitlines() if "for the schedule of" in line]


def test_steps_match_hand_calculation() -> None:
    full = Settings.for_dataset("cifar100")
    assert steps(full) == 5 * 5 * 500 / 10 / 16
    less = Settings.for_dataset("cifar100", rounds=1, train_per_class=50, clients=5, batch_size=32)
    assert steps(less) == 1 * 5 * 50 / 5 / 32


def test_warning_names_method_with_dataset_rate(tmp_path: Path) -> None:
    short = ["--clients", "5", "--batch-size", "32"]  # and 1 round instead of 2, batches of 8
    (line,) = schedule_warnings(tmp_path / "run", *short)
    assert (
        "hgp may learn little with server_lr=0.001, chosen for the schedule of data set digits, "
        "which has 8 times as many steps as this run; search with" in line
    )
    assert "`fczoo tune --methods hgp`" in line


@pytest.mark.parametrize(
    "more",
    [["--clients", "5", "--batch-size", "32", "--set", "hgp.server_lr=0.02"], ["--clients", "5"]],
)
def test_given_rate_or_enough_steps_give_no_warning(tmp_path: Path, more: list[str]) -> None:
    assert not schedule_warnings(tmp_path / "run", *more)


def warnings_for(caplog: pytest.LogCaptureFixture, name: str, **changes: Any) -> list[str]:
    """Return the warnings of a method with its options for these settings."""
    settings = Settings.for_dataset(changes.pop("dataset"), **changes)
    warn_of_short_schedules([configure_run(name, settings, {})])
    return caplog.messages


def test_warning_names_search_behind_quick_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Name the search that found the values of protocol quick.

    The search has 2 * 2 * 10 / 10 / 8 steps per class, this run 1 * 1 * 10 / 10 / 16.
    """
    short = {"protocol": "quick", "rounds": 1, "epochs": 1}
    (line,) = warnings_for(caplog, "hgp", dataset="tinyimagenet", **short)
    assert "for the schedule of a search on cifar100 (fczoo tune: CIFAR-100, ViT-Ti/16 at " in line
    assert "2 epochs, 12 trials), which has 8 times as many steps per class as this run;" in line
    assert "tinyimagenet" not in line


@pytest.mark.parametrize("dataset", ["tinyimagenet", "cifar100", "cub200", "imagefolder"])
def test_quick_protocol_gives_no_warning(caplog: pytest.LogCaptureFixture, dataset: str) -> None:
    assert not warnings_for(caplog, "hgp", dataset=dataset, protocol="quick")


def test_quick_with_unknown_image_count_gives_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Skip the warning for a folder with all images, whose number is unknown."""
    short = {"protocol": "quick", "rounds": 1, "epochs": 1, "train_per_class": "none"}
    assert not warnings_for(caplog, "hgp", dataset="imagefolder", **short)


def test_warning_names_protocol_behind_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Name the protocol that states the value for a data set.

    HGP's paper has 5 rounds x 5 epochs and batches of 16, this run 1 x 1 and the same batches.
    """
    (line,) = warnings_for(caplog, "hgp", dataset="imagenet_r", rounds=1, epochs=1, protocol="none")
    warning = (
        "hgp may learn little with lr=0.03, chosen for the schedule of protocol hgp (paper, "
        "appendix H), which has 25 times as many"
    )
    assert warning in line


def test_warnings_are_separate_per_source(caplog: pytest.LogCaptureFixture) -> None:
    short = {"rounds": 1, "epochs": 1, "train_per_class": 5, "protocol": "none"}
    lines = warnings_for(caplog, "pilora", dataset="tinyimagenet", **short)
    assert ["lr_prototype=0.005" in line for line in lines] == [True, False]
    assert ["released scripts" in line for line in lines] == [False, True]


def test_value_of_unknown_origin_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Skip the warning for FedCLM, whose rates no protocol states."""
    short = {"rounds": 1, "epochs": 1, "train_per_class": 5, "protocol": "none"}
    assert not warnings_for(caplog, "fedclm", dataset="imagenet_r", **short)
