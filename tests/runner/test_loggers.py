"""Trackers: their records, and what happens without them.

Their own packages are tested where installed.
"""

import logging
import sys

import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.core.metrics import METRICS, MORE_METRICS
from fczoo.core.registry import create_method
from fczoo.runner.trackers import LOGGERS, Logger, check_loggers
from helpers_cli import TINY

SMALL = [*TINY, "--rounds", "2", "--tasks", "2", "--clients", "2"]
EVALUATIONS = ("ECE", "client_mean", "client_std", "client_worst", "task_aware", "top5")
BENCH = ["bench", "--methods", "fedavg", "--set", "fedavg.tune=head", *SMALL]


class Diary(Logger):
    """Keep every record; fail at the step that ``broken`` names."""

    extra = "math"  # a package that is always there
    broken = -1
    pages: list[tuple] = []

    def open(self, name, config):
        if self.broken == 0:
            raise ConnectionError("no server\nat all")
        self.pages.append(
            (
                "open",
                self.folder.name,
                name,
                config["fedavg.tune"],
                config["rounds"],
                config["seed"],
            )
        )

    def log(self, values, step):
        if step == self.broken:
            raise ConnectionError("server gone")
        self.pages.append((step, *sorted(values)))

    def close(self):
        self.pages.append(("close",))


@pytest.fixture
def diary(monkeypatch) -> type[Diary]:
    monkeypatch.setitem(LOGGERS, "math", Diary)
    monkeypatch.setattr(Diary, "pages", [])
    return Diary


def test_a_logger_gets_every_round_and_task_and_is_closed(diary, tmp_path):
    result = CliRunner().invoke(
        main, [*BENCH, "--seeds", "3", "--log", "math", "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output
    round_, metrics = (
        ("bytes_down", "bytes_up", "loss", "seconds"),
        (*METRICS, *MORE_METRICS, *EVALUATIONS),
    )
    assert diary.pages == [
        ("open", "seed3", "fedavg seed 3", "head", 2, 3),
        *[(1, *round_), (2, *round_), (2, *sorted([*metrics, "task 1"]))],
        *[(3, *round_), (4, *round_), (4, *sorted([*metrics, "task 1", "task 2"])), ("close",)],
    ]


def test_a_logger_gets_the_accuracy_of_rounds_that_are_evaluated(diary, tmp_path):
    record = {"loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    with diary(tmp_path, {"rounds": 2}) as tracker:
        tracker.start(create_method("fedavg"), 0, 2, 2, 0)
        tracker.round(record)
        tracker.round({**record, "accuracy": 50.0})
    assert [page for page in diary.pages if page[0] in (1, 2)] == [
        (1, *sorted(record)),
        (2, *sorted([*record, "accuracy"])),
    ]


def test_a_tracker_that_fails_late_costs_a_warning_and_one_that_cannot_begin_ends_the_command(
    diary, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(diary, "broken", 3)
    with caplog.at_level(logging.WARNING):
        result = CliRunner().invoke(main, [*BENCH, "--log", "math", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0
    assert [p[0] for p in diary.pages] == ["open", 1, 2, 2]
    assert "stops after round 3: server gone" in caplog.text
    monkeypatch.setattr(diary, "broken", 0)
    result = CliRunner().invoke(main, [*BENCH, "--log", "math", "--out", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: --log math cannot begin: no server\n")


def test_a_failing_run_closes_its_logger(diary, tmp_path):
    with pytest.raises(ZeroDivisionError), diary(tmp_path, {"rounds": 1}) as logger:
        logger.running = True
        raise ZeroDivisionError
    assert diary.pages == [("close",)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_is_written(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(main, [*BENCH, "--log", name, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"Error: --log {name} needs the package {name}; pip install 'fczoo[{name}]'\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_unknown_logger_is_named():
    with pytest.raises(
        FczooError, match="no logger is called 'tensorbord'; did you mean tensorboard"
    ):
        check_loggers(["tensorbord"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_the_real_package_takes_the_numbers(name, monkeypatch, tmp_path):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = LOGGERS[name](tmp_path, {})
    logger.open("fedavg seed 0", {"rounds": 2, "blocks": (0, 1), "order": None})
    logger.log({"loss": 0.5, "A_N": 71.25}, 1)
    logger.close()
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [(e.step, e.value) for e in events.Scalars("A_N")] == [(1, 71.25)]
    elif name == "mlflow":
        (metric,) = [p for p in written if p.name == "A_N"]
        assert metric.read_text().split()[1:3] == ["71.25", "1"]
    else:
        assert any(p.suffix == ".wandb" and p.stat().st_size > 0 for p in written)
