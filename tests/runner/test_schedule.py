"""A schedule far below that for which a method's rates were chosen is warned of, and no other."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.registry import create_method
from fczoo.federation.settings import Settings
from fczoo.runner.schedule import steps, warn_of_short_schedules
from helpers_cli import TINY


def warned(out: Path, *more: str) -> list[str]:
    done = CliRunner().invoke(main, ["bench", "--methods", "hgp,fedncm", "--out", str(out), *TINY, *more])
    assert done.exit_code == 0, done.output
    return [line for line in done.stderr.splitlines() if "for the schedule of" in line]


def test_steps_grow_with_training_and_images_and_fall_with_clients_and_batch() -> None:
    whole = Settings.for_dataset("cifar100")
    assert steps(whole) == 5 * 5 * 500 / 10 / 16
    less = Settings.for_dataset("cifar100", rounds=1, train_per_class=50, clients=5, batch_size=32)
    assert steps(less) == 1 * 5 * 50 / 5 / 32


def test_a_method_with_a_rate_of_the_data_set_is_named(tmp_path: Path) -> None:
    short = ["--clients", "5", "--batch-size", "32"]  # and 1 round instead of 2, batches of 8
    (line,) = warned(tmp_path / "run", *short)
    assert (
        "hgp has server_lr=0.001 for the schedule of data set digits, which has 8 times the steps of this run"
        in line
    )
    assert "`fczoo tune --methods hgp`" in line


@pytest.mark.parametrize(
    "more",
    [["--clients", "5", "--batch-size", "32", "--set", "hgp.server_lr=0.02"], ["--clients", "5"]],
)
def test_own_rates_and_enough_training_need_no_word(tmp_path: Path, more: list[str]) -> None:
    assert not warned(tmp_path / "run", *more)


def test_rates_of_a_protocol_are_not_called_those_of_the_data_set(caplog: pytest.LogCaptureFixture) -> None:
    """``quick`` has rates that were found on another data set; its schedule here has ten images per class."""
    settings = Settings.for_dataset("tinyimagenet", protocol="quick", train_per_class=1)
    method = create_method("hgp", settings.dataset, **settings.method_options("hgp"))
    warn_of_short_schedules(settings, [method])
    (record,) = caplog.records
    assert "for the schedule of protocol quick, which has 10 times the steps" in record.getMessage()
    assert "tinyimagenet" not in record.getMessage()
