"""Test ``--quiet``, ``--verbose``, ``--log-format`` and colours of messages on stderr."""

import json
import re

import pytest
from click.testing import CliRunner, Result

from fczoo.cli.app import main
from fczoo.core.command_messages import MessageStyle, message_line, use_message_style

SMALL = ["--train-per-class", "8", "--test-per-class", "4", "--tasks", "2", "--clients", "2"]
BENCH = ["bench", "--methods", "fedavg", *SMALL, "--rounds", "2", "--epochs", "1", "--out", "run"]


def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path, *words: str) -> Result:
    monkeypatch.chdir(tmp_path)
    return CliRunner().invoke(main, [*BENCH, *words])


def test_quiet_prints_table_only(monkeypatch, tmp_path):
    outcome = invoke(monkeypatch, tmp_path, "--quiet")
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    assert re.search(r"^method +A_N", outcome.stdout, re.M)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "task 2 of 2" in log


def test_verbose_prints_one_line_per_round(monkeypatch, tmp_path):
    lines = invoke(monkeypatch, tmp_path, "--verbose", "--eval-every", "1").stderr.splitlines()
    rounds = [line for line in lines if ", round " in line]
    assert len(rounds) == 2 * 2
    pattern = r"fedavg seed 0: task 2, round 1, loss [\d.]+, [\d.]+ % over the classes"
    assert re.match(pattern, rounds[2])
    assert ", round " not in (tmp_path / "run" / "log.txt").read_text()


def test_json_log_has_time_level_and_message(monkeypatch, tmp_path):
    stderr = invoke(monkeypatch, tmp_path, "--log-format", "json").stderr
    records = [json.loads(line) for line in stderr.splitlines()]
    assert all(list(record) == ["time", "level", "message"] for record in records)
    assert any("task 2 of 2" in record["message"] for record in records)
    assert {record["level"] for record in records} <= {"INFO", "WARNING"}
    again = invoke(monkeypatch, tmp_path, "--log-format", "json", "--rounds", "3")
    assert again.exit_code == 1
    assert json.loads(again.stderr.splitlines()[-1])["level"] == "ERROR"


def test_message_style_is_restored_after_command(monkeypatch, tmp_path):
    invoke(monkeypatch, tmp_path, "--quiet", "--dry-run")
    assert message_line("INFO", "text") == "text"


@pytest.mark.parametrize(
    ("variables", "colours"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colours_follow_environment_variables(variables, colours, monkeypatch, tmp_path):
    """Print colours only on request, as the output of a test is not a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = CliRunner().invoke(main, ["report", str(tmp_path)])
    start = "\x1b[31mError:\x1b[0m " if colours else "Error: "
    assert outcome.stderr.startswith(start)


def test_message_style_selects_log_levels():
    """Print rounds only with verbose, and only errors with quiet."""
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    for style, printed in (
        (MessageStyle(), levels[1:]),
        (MessageStyle(verbose=True), levels),
        (MessageStyle(quiet=True), levels[3:]),
    ):
        with use_message_style(style):
            assert tuple(level for level in levels if message_line(level, "text")) == printed
