"""Test ``fczoo tune`` with earlier searches, failed trials and invalid files."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sqlalchemy import URL

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.core.files import write_record
from fczoo.federation.benchmark import Benchmark
from fczoo.runner import tuning_trials
from fczoo.runner.tuned_file import FORMAT, TUNED_FILE, TunedFile, read_tuned
from helpers_cli import TINY, run

ONE = ["tune", *TINY, "--trials", "1"]


def run_search(out: Path, *words: str) -> TunedFile:
    run("tune", *TINY, *words, "--out", str(out))
    return read_tuned(out / TUNED_FILE)


def error_line(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 1, result.output
    return result.output.strip().splitlines()[-1]


def stored_trials(out: Path, name: str) -> int:
    url = URL.create("sqlite", database=str(out / f"{name}.db")).render_as_string()
    return len(optuna.load_study(study_name=name, storage=url).trials)


@pytest.fixture
def replace_runs(monkeypatch) -> Callable[[Callable[[Any], float]], None]:
    """Return a function that replaces runs by a score of the method."""

    def patch_run(score: Callable[[Any], float]) -> None:
        def run_scored(bench: Benchmark, method: Any, *more: Any) -> SimpleNamespace:
            return SimpleNamespace(metrics={"A_N": score(method)})

        monkeypatch.setattr(Benchmark, "run", run_scored)

    return patch_run


def test_trials_beyond_effort_are_ignored(tmp_path, replace_runs):
    replace_runs(lambda method: 50.0 + method.ridge / 1e5 if method.name == "fedridge" else 50.0)
    three = run_search(tmp_path / "more", "--methods", "fedridge", "--trials", "3")
    one = run_search(tmp_path / "more", "--methods", "fedridge", "--trials", "1")
    assert one == run_search(tmp_path / "one", "--methods", "fedridge", "--trials", "1")
    assert three.methods["fedridge"].score > one.methods["fedridge"].score
    assert stored_trials(tmp_path / "more", "fedridge") == 3
    two_methods = run_search(tmp_path / "more", "--methods", "fedridge,fedncm", "--trials", "2")
    assert [len(search.trials) for search in two_methods.methods.values()] == [2, 2]
    assert (
        run_search(tmp_path / "more", "--methods", "fedridge,fedncm", "--trials", "3").methods[
            "fedridge"
        ]
        == three.methods["fedridge"]
    )


def test_trials_of_other_code_are_rejected(tmp_path, replace_runs, monkeypatch):
    replace_runs(lambda method: 50.0)
    run_search(tmp_path, "--methods", "fedncm", "--trials", "1")
    monkeypatch.setattr(
        "fczoo.runner.tuning_trials.code_of",
        lambda settings, method: {"fczoo.core.method": "f" * 64},
    )
    message = error_line(
        "tune", *TINY, "--methods", "fedncm", "--trials", "2", "--out", str(tmp_path)
    )
    assert "the trials of fedncm in this folder used other code; give another --out" in message
    assert stored_trials(tmp_path, "fedncm") == 1


def test_trials_with_other_weights_are_rejected(tmp_path, replace_runs):
    replace_runs(lambda method: 50.0)
    weights, out = tmp_path / "net.safetensors", tmp_path / "search"
    tensors = load_file(files("fczoo") / "assets" / "vit_nano_32.safetensors")
    save_file(tensors, weights)
    words = ["--backbone", str(weights), "--trials", "1"]
    first_search = run_search(out, "--methods", "fedncm", *words)
    assert first_search.weights == sha256(weights.read_bytes()).hexdigest()
    search = first_search.methods["fedncm"]
    assert search.versions["optuna"] == optuna.__version__ and search.command
    tensors["norm.bias"] += 1.0
    save_file(tensors, weights)
    folder = ["--backbone", str(weights), "--out", str(out)]
    message = error_line("tune", *TINY, "--methods", "fedncm", "--trials", "2", *folder)
    assert "from a search with other backbone weights; give another --out" in message
    (out / TUNED_FILE).unlink()
    message = error_line("tune", *TINY, "--methods", "fedncm", "--trials", "2", *folder)
    assert "the trials of fedncm in this folder used other weights; give another --out" in message
    assert stored_trials(out, "fedncm") == 1


def test_tuned_file_keeps_earlier_methods(tmp_path, replace_runs):
    replace_runs(lambda method: 50.0)
    old_searches = run_search(tmp_path, "--methods", "fedncm", "--trials", "1").methods
    new_searches = run_search(tmp_path, "--methods", "fedridge", "--trials", "1").methods
    assert list(new_searches) == ["fedncm", "fedridge"]
    assert new_searches["fedncm"] == old_searches["fedncm"]
    content, out = (tmp_path / TUNED_FILE).read_bytes(), ["--out", str(tmp_path)]
    message = error_line("tune", *TINY, "--methods", "fedridge", "--trials", "2", *out)
    assert "does not have 2 trials of fedncm; add these methods to --methods to search" in message
    assert stored_trials(tmp_path, "fedridge") == 1
    assert "is from a search with other settings" in error_line(
        *ONE, "--methods", "fedcof", "--rounds", "2", *out
    )
    assert "is from a search with other settings" in error_line(
        *ONE, "--methods", "fedcof", "--seed", "1", *out
    )
    assert not (tmp_path / "fedcof.db").exists()
    assert (tmp_path / TUNED_FILE).read_bytes() == content


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", ","], "--methods is empty; give one or more entries"),
        (
            ["--methods", "fedncm", "--first-tasks", "9"],
            "--first-tasks is 9, but digits is divided into 3 tasks",
        ),
        (
            ["--methods", "fedncm,glfc", "--moving", "1"],
            "glfc does not support labels that return in later tasks",
        ),
        (["--methods", "fedncm", "--local", "scaffold"], "fedncm trains none"),
    ],
)
def test_invalid_tune_command_writes_nothing(tmp_path, words, said):
    assert said in error_line(*ONE, *words, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_tune_rejects_options_set_by_search(tmp_path):
    for option in ("--vary", "--class-order", "--class-order-seed", "--partition-seed"):
        result = CliRunner().invoke(
            main, [*ONE, "--methods", "fedncm", option, "3", "--out", str(tmp_path)]
        )
        assert result.exit_code == 2
        assert "fczoo tune: no such option" in result.output
        assert option in result.output


def test_failed_search_reports_reason_and_keeps_others(tmp_path, replace_runs):
    def diverging(method: Any) -> float:
        if method.name == "fedavg":
            raise FczooError("it diverged")
        return 50.0

    replace_runs(diverging)
    result = CliRunner().invoke(main, [*ONE, "--methods", "fedavg,fedncm", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "fedavg: trial 1 of 1, failed: it diverged",
        "fedncm: trial 1 of 1, 50.0 %",
        "Error: all trials of fedavg failed, the last with: it diverged; "
        f"{tmp_path / TUNED_FILE} has values of the other methods",
    ]
    assert list(read_tuned(tmp_path / TUNED_FILE).methods) == ["fedncm"]


def test_too_few_clients_start_no_trial(tmp_path):
    message = error_line(*ONE, "--methods", "fedncm", "--min-clients", "50", "--out", str(tmp_path))
    assert "--min-clients 50 is more than the " in message
    assert not (tmp_path / TUNED_FILE).exists()


def test_failed_trial_is_never_best(tmp_path, replace_runs):
    """Never choose a failed trial, even if the others score 0."""

    def fail_unless_ridge_is_1e4(method: Any) -> float:
        if method.ridge != 1e4:
            raise FczooError("broken")
        return 0.0

    replace_runs(fail_unless_ridge_is_1e4)
    words = ["--methods", "fedridge", *TINY, "--trials", "4", "--out", str(tmp_path)]
    assert "  failed  " in run("tune", *words)
    search = read_tuned(tmp_path / TUNED_FILE).methods["fedridge"]
    assert search.values == {"normalise": False, "ridge": 1e4} and search.score == 0
    assert [trial.get("error") for trial in search.trials] == ["broken", "broken", "broken", None]


@pytest.mark.parametrize("words", [["--partition", "overlap:0.6"], ["--moving", "1"], []])
def test_image_steps_match_dry_run(tmp_path, replace_runs, words):
    """Compare the image-steps of a search with a dry run.

    They cover all tasks. The search holds out 2 of 8 images per class.
    """
    replace_runs(lambda method: 50.0)
    steps = run_search(tmp_path, "--methods", "fedncm", "--trials", "1", *words).image_steps
    orders = [
        "--train-per-class",
        "6",
        "--class-order-seed",
        "1000000",
        "--partition-seed",
        "1000000",
    ]
    dry = run("bench", "--methods", "fedncm", *TINY, *orders, *words, "--dry-run")
    (line,) = [line for line in dry.splitlines() if line.startswith("Image-steps")]
    assert line.endswith(f" {steps}")
    assert (steps > 60) == bool(words)


def test_first_tasks_are_limited_to_task_count(tmp_path, replace_runs):
    replace_runs(lambda method: 50.0)
    two = ["--methods", "fedncm", "--tasks", "2", "--trials", "1", "--out", str(tmp_path)]
    assert "after the first 2 tasks, on" in run("tune", *TINY, *two)
    assert read_tuned(tmp_path / TUNED_FILE).effort.tasks == 2
    url = URL.create("sqlite", database=str(tmp_path / "fedncm.db")).render_as_string()
    study = optuna.load_study(study_name="fedncm", storage=url)
    search = study.user_attrs["search"]
    study.set_user_attr("search", {**search, "effort": {**search["effort"], "tasks": 3}})
    run("tune", *TINY, *two)  # as written by an earlier version


def test_tune_accepts_large_seed_and_special_characters(tmp_path):
    out = tmp_path / "a?b {c} 50%41"
    run_search(out, "--methods", "fedncm", "--trials", "1", "--seed", "5000000")
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]
    assert (out / "fedncm.db").is_file() and stored_trials(out, "fedncm") == 1


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_damaged_search_is_rejected(tmp_path, replace_runs, kept):
    replace_runs(lambda method: 50.0)
    run_search(tmp_path, "--methods", "fedncm", "--trials", "1")
    file = tmp_path / "fedncm.db"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))] + b"damaged" * 1000)
    message = error_line(*ONE, "--methods", "fedncm", "--out", str(tmp_path))
    assert f"cannot read the trials in {file}: " in message
    assert "give another --out" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"effort": {}}, "effort: Object missing required field `trials`"),
        ({"settings": {}}, "settings have no dataset"),
        (
            {"space": {"nope": [1, 2, "log"]}},
            "has values of fedncm.nope, an option that fedncm",
        ),
    ],
)
def test_unusable_tuned_file_is_rejected(tmp_path, replace_runs, change, said):
    replace_runs(lambda method: 50.0)
    run_search(tmp_path, "--methods", "fedncm", "--trials", "1")
    content = json.loads((tmp_path / TUNED_FILE).read_text())
    if "space" in change:
        content["methods"]["fedncm"] |= change
    else:
        content |= change
    write_record(tmp_path / TUNED_FILE, FORMAT, {k: v for k, v in content.items() if k != "sha256"})
    message = error_line(
        "bench", "--methods", "fedncm", *TINY, "--tuned", str(tmp_path / TUNED_FILE)
    )
    assert str(tmp_path / TUNED_FILE) in message and said in message


def test_tuned_file_without_score_per_class_is_read(tmp_path, replace_runs):
    replace_runs(lambda method: 50.0)
    run_search(tmp_path, "--methods", "fedncm", "--trials", "1")
    content = json.loads((tmp_path / TUNED_FILE).read_text())
    del content["effort"]["score_per_class"], content["sha256"], content["format"]
    (tmp_path / TUNED_FILE).write_text(json.dumps(content))
    assert read_tuned(tmp_path / TUNED_FILE).effort.trials == 1


def test_swallowed_interrupt_stops_search(tmp_path, monkeypatch):
    """Stop although scipy's Sobol sequence prints a KeyboardInterrupt and continues."""
    calls = []

    def swallow(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)  # the signal handler runs earlier
        return point(*arguments)

    point = tuning_trials.sobol_point
    monkeypatch.setattr(tuning_trials, "sobol_point", swallow)
    words = ["tune", *TINY, "--trials", "4", "--methods", "fedavg", "--out", str(tmp_path)]
    handler = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script may ignore SIGINT
        result = CliRunner().invoke(main, words)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result.exit_code == 130
    assert "stopped on request" in result.output
    assert len(calls) == 1
