"""``eval_every`` and ``personal_epochs``: more measurements, and no other change of a run."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.settings import Settings
from fczoo.reports.runs import WITHOUT_EFFECT
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_resume import Crash, crash_after, rounds, run_and_record, timeless


def test_curve_points_by_hand(tmp_path: Path) -> None:
    """Measure after rounds 2 and 4 of the five of each task, and after the task."""
    bench = toy_bench(torch.float32, rounds=5, epochs=1, eval_every=2)
    result = run_and_record(bench, small_method("fedavg"), tmp_path)
    assert [point[:2] for point in result.curve] == [[t, r] for t in range(3) for r in (2, 4, 5)]
    log = rounds(tmp_path)
    assert [r["round"] for r in log if "accuracy" in r] == [1, 3] * 3
    in_rounds = [point[2] for point in result.curve if point[1] < 5]
    assert [r["accuracy"] for r in log if "accuracy" in r] == in_rounds
    at_ends = [point for point in result.curve if point[1] == 5]
    pooled = [100.0, None, result.metrics["A_N"]]
    pooled[0] = result.accuracy[0][0]
    pooled[1] = (9 * result.accuracy[1][0] + 6 * result.accuracy[1][1]) / 15
    assert [point[2] for point in at_ends] == pytest.approx(pooled)
    sent = [r["bytes_up"] + r["bytes_down"] for r in log]
    assert [point[3] for point in result.curve] == [
        sum(sent[: 5 * t + r]) for t in range(3) for r in (2, 4, 5)
    ]


def test_resumed_run_matches_bit_for_bit(tmp_path: Path) -> None:
    bench, method = toy_bench(torch.float32, eval_every=1), small_method("lwf")
    unhurt = run_and_record(bench, method, tmp_path / "unhurt")
    path = tmp_path / "checkpoint.safetensors"
    for _ in range(2):
        with pytest.raises(Crash):
            run_and_record(bench, method, tmp_path / "hurt", Checkpoint(path, crash_after(1)))
    result = run_and_record(bench, method, tmp_path / "hurt", Checkpoint(path))
    assert timeless(asdict(result)) == timeless(asdict(unhurt))
    assert rounds(tmp_path / "hurt") == rounds(tmp_path / "unhurt")


def test_measurements_count_as_evaluation_time() -> None:
    """Count the calls of the phase: one per task, and one per round that is measured."""
    phases: list[str] = []
    run = toy_bench(torch.float32, epochs=1, eval_every=1).start(small_method("fedavg"))
    measure = run.result.phase
    run.result.phase = lambda name: phases.append(name) or measure(name)  # type: ignore
    list(run)
    assert phases.count("evaluation") == 3 + 3 * 2


def test_default_values_are_not_written() -> None:
    """Leave default values out of a run's description."""
    assert not {"eval_every", "personal_epochs"} & Settings().portable().keys()
    assert Settings(eval_every=2).portable()["eval_every"] == 2
    assert {"eval_every", "personal_epochs"} <= set(WITHOUT_EFFECT)  # tables may have both
