"""bf16 and fp32: a warning if bf16 is slower, and ``auto``, which takes the faster type."""

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.federation import device
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.settings import Settings

TINY = {
    "train_per_class": 4,
    "test_per_class": 2,
    "rounds": 1,
    "epochs": 1,
    "tasks": 2,
    "clients": 2,
}
ARGUMENTS = [
    argument
    for name, value in TINY.items()
    for argument in (f"--{name.replace('_', '-')}", str(value))
]


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """Replace the measurement: seconds of a product by type."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 50.0}
    monkeypatch.setattr(device, "product_seconds", seconds.__getitem__)
    device.bf16_slowdown.cache_clear()
    yield seconds
    device.bf16_slowdown.cache_clear()


def run(out: Path, *words: str) -> tuple[str, str]:
    """Run a bench; return its output and the precision that it stored."""
    result = CliRunner().invoke(
        main, ["bench", "--methods", "fedncm", *ARGUMENTS, "--out", str(out), *words]
    )
    assert result.exit_code == 0, result.output
    return result.output, json.loads((out / "bench.json").read_text())["settings"]["precision"]


@pytest.mark.parametrize(("bf16", "taken"), [(50.0, "fp32"), (1.0, "fp32"), (0.5, "bf16")])
def test_auto_precision_selects_faster_type(
    bf16: float, taken: str, speed: dict[torch.dtype, float], tmp_path: Path
) -> None:
    speed[torch.bfloat16] = bf16
    output, precision = run(tmp_path / "run", "--precision", "auto")
    assert precision == taken
    assert f", {taken}, cpu)" in output
    assert "a matrix product" not in output


def test_resumed_run_keeps_precision(speed: dict[torch.dtype, float], tmp_path: Path) -> None:
    """Keep the precision of a resumed run.

    The second command runs as if on a processor with faster bf16.
    """
    run(tmp_path / "run", "--precision", "auto")
    (tmp_path / "run/fedncm/seed0/result.json").unlink()
    speed[torch.bfloat16] = 0.5
    device.bf16_slowdown.cache_clear()
    assert run(tmp_path / "run", "--precision", "auto")[1] == "fp32"


def test_slow_bf16_warns_once_with_factor(speed: dict[torch.dtype, float], tmp_path: Path) -> None:
    warning = (
        "a matrix product in bf16 takes 50.0 times as long as in fp32; give --precision fp32, or "
        "auto"
    )
    output = run(tmp_path / "run", "--precision", "bf16")[0]
    assert output.count(f"WARNING: on this processor {warning}") == 1  # on stderr
    assert output.count(f"warning: on this processor {warning}") == 1  # below the table
    words = ["bench", "--methods", "fedncm", *ARGUMENTS, "--precision", "bf16", "--dry-run"]
    assert CliRunner().invoke(main, words).output.count(warning) == 1


@pytest.mark.parametrize(("chosen", "bf16"), [("bf16", 0.5), ("bf16", 1.1), ("fp32", 50.0)])
def test_no_warning_without_slowdown(
    chosen: str, bf16: float, speed: dict[torch.dtype, float], caplog: pytest.LogCaptureFixture
) -> None:
    speed[torch.bfloat16] = bf16
    with caplog.at_level(logging.WARNING):
        device.warn_of_slow_bf16(Settings(precision=chosen, device="cpu"))
    assert not caplog.records


def test_library_resolves_auto_precision(speed: dict[torch.dtype, float]) -> None:
    assert (
        Benchmark.open(Settings.for_dataset("digits", precision="auto", **TINY)).settings.precision
        == "fp32"
    )


def test_doctor_reports_bf16_slowdown(speed: dict[torch.dtype, float]) -> None:
    output = CliRunner().invoke(main, ["doctor"]).output
    assert "a matrix product takes 50 times as long as in fp32 on this processor" in output


def test_slurm_rejects_auto_precision(speed: dict[torch.dtype, float], tmp_path: Path) -> None:
    words = [
        "--methods",
        "fedncm",
        "--precision",
        "auto",
        "--executor",
        "slurm",
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(main, ["bench", *words])
    assert result.exit_code == 1 and "give fp32 or bf16" in result.stderr


def test_product_is_timed_in_seconds() -> None:
    assert 0 < device.product_seconds(torch.float32) < 10
