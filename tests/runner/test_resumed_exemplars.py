"""Test resumed runs with empty exemplar rounds and their peak memory."""

from dataclasses import asdict

import pytest

from fczoo.federation.checkpoint import Checkpoint
from helpers_resume import Crash, crash_after, rounds, run_and_record, timeless


@pytest.mark.parametrize("saves", [1, 3, 4, 5])
def test_run_resumes_after_empty_exemplar_round(make_bench, small_method, tmp_path, saves):
    bench, method = make_bench(rounds=1), small_method("podnet", memory=0)
    unhurt = run_and_record(bench, method, tmp_path / "unhurt")
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Crash):
        run_and_record(bench, method, tmp_path / "hurt", Checkpoint(path, crash_after(saves)))
    result = run_and_record(bench, method, tmp_path / "hurt", Checkpoint(path))
    assert timeless(asdict(result)) == timeless(asdict(unhurt))
    records = rounds(tmp_path / "hurt")
    assert records == rounds(tmp_path / "unhurt")
    assert [(r["task"], r["round"]) for r in records] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [r["clients"] for r in records if r["round"]] == [[], []]


def test_peak_memory_covers_all_processes(make_bench, small_method, tmp_path, monkeypatch):
    bench, method, path = make_bench(), small_method("fedncm"), tmp_path / "checkpoint.safetensors"
    peaks = iter([7, 3, 3, 3])
    monkeypatch.setattr("fczoo.federation.run.peak_memory", lambda _: {"run": next(peaks)})
    with pytest.raises(Crash):
        run_and_record(bench, method, tmp_path, Checkpoint(path, crash_after(1)))
    assert run_and_record(bench, method, tmp_path, Checkpoint(path)).peak_memory == {"run": 7}
