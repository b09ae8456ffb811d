"""``fczoo tune`` in a folder that holds a search, where trials fail, and what it says of their length."""

import json
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
from fczoo.federation.benchmark import Bench
from fczoo.runner.tuning import FORMAT, TUNED, Tuned, read_tuned
from helpers_cli import TINY, run

ONE = ["tune", *TINY, "--trials", "1"]


def searched(out: Path, *words: str) -> Tuned:
    run("tune", *TINY, *words, "--out", str(out))
    return read_tuned(out / TUNED)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 1, done.output
    return done.output.strip().splitlines()[-1]


def trials_kept(out: Path, name: str) -> int:
    place = URL.create("sqlite", database=str(out / f"{name}.db")).render_as_string()
    return len(optuna.load_study(study_name=name, storage=place).trials)


@pytest.fixture
def scored(monkeypatch) -> Callable[[Callable[[Any], float]], None]:
    """Makes a function of the method take the place of runs."""

    def instead(score: Callable[[Any], float]) -> None:
        def made(bench: Bench, method: Any, *more: Any) -> SimpleNamespace:
            return SimpleNamespace(metrics={"A_N": score(method)})

        monkeypatch.setattr(Bench, "run", made)

    return instead


def test_what_was_tried_beyond_the_effort_does_not_count(tmp_path, scored):
    scored(lambda method: 50.0 + method.ridge / 1e5 if method.name == "fedridge" else 50.0)
    more = searched(tmp_path / "more", "--methods", "fedridge", "--trials", "3")
    one = searched(tmp_path / "more", "--methods", "fedridge", "--trials", "1")
    assert one == searched(tmp_path / "one", "--methods", "fedridge", "--trials", "1")
    assert more.methods["fedridge"].score > one.methods["fedridge"].score
    assert trials_kept(tmp_path / "more", "fedridge") == 3
    both = searched(tmp_path / "more", "--methods", "fedridge,fedncm", "--trials", "2")
    assert [len(found.trials) for found in both.methods.values()] == [2, 2]
    assert (
        searched(tmp_path / "more", "--methods", "fedridge,fedncm", "--trials", "3").methods["fedridge"]
        == more.methods["fedridge"]
    )


def test_trials_of_other_code_are_not_gone_on_with(tmp_path, scored, monkeypatch):
    scored(lambda method: 50.0)
    searched(tmp_path, "--methods", "fedncm", "--trials", "1")
    monkeypatch.setattr(
        "fczoo.runner.study.code_of", lambda settings, method: {"fczoo.core.method": "f" * 64}
    )
    said = refused("tune", *TINY, "--methods", "fedncm", "--trials", "2", "--out", str(tmp_path))
    assert "the trials of fedncm in this folder were made with other code; give another --out" in said
    assert trials_kept(tmp_path, "fedncm") == 1


def test_trials_on_other_weights_of_the_same_name_are_not_gone_on_with(tmp_path, scored):
    scored(lambda method: 50.0)
    weights, out = tmp_path / "net.safetensors", tmp_path / "search"
    bundled = load_file(files("fczoo") / "assets" / "vit_nano_32.safetensors")
    save_file(bundled, weights)
    words = ["--backbone", str(weights), "--trials", "1"]
    before = searched(out, "--methods", "fedncm", *words)
    assert before.weights == sha256(weights.read_bytes()).hexdigest()
    found = before.methods["fedncm"]
    assert found.versions["optuna"] == optuna.__version__ and found.command
    bundled["norm.bias"] += 1.0
    save_file(bundled, weights)
    folder = ["--backbone", str(weights), "--out", str(out)]
    said = refused("tune", *TINY, "--methods", "fedncm", "--trials", "2", *folder)
    assert "found with other weights of the backbone; give another --out" in said
    (out / TUNED).unlink()
    said = refused("tune", *TINY, "--methods", "fedncm", "--trials", "2", *folder)
    assert "the trials of fedncm in this folder were made with other weights; give another --out" in said
    assert trials_kept(out, "fedncm") == 1


def test_methods_that_were_searched_before_stay_in_the_file(tmp_path, scored):
    scored(lambda method: 50.0)
    before = searched(tmp_path, "--methods", "fedncm", "--trials", "1").methods
    after = searched(tmp_path, "--methods", "fedridge", "--trials", "1").methods
    assert list(after) == ["fedncm", "fedridge"] and after["fedncm"] == before["fedncm"]
    content, out = (tmp_path / TUNED).read_bytes(), ["--out", str(tmp_path)]
    said = refused("tune", *TINY, "--methods", "fedridge", "--trials", "2", *out)
    assert "another number of trials than 2 of fedncm; name these in --methods, too" in said
    assert trials_kept(tmp_path, "fedridge") == 1
    assert "was found with other settings" in refused(*ONE, "--methods", "fedcof", "--rounds", "2", *out)
    assert "was found with other settings" in refused(*ONE, "--methods", "fedcof", "--seed", "1", *out)
    assert not (tmp_path / "fedcof.db").exists() and (tmp_path / TUNED).read_bytes() == content


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", ""], "no methods are named"),
        (["--methods", "fedncm", "--first-tasks", "9"], "--first-tasks is 9; digits is cut into 3"),
        (["--methods", "fedncm,glfc", "--moving", "1"], "glfc holds that a class belongs to one task"),
        (["--methods", "fedncm", "--local", "scaffold"], "fedncm trains nothing"),
    ],
)
def test_nothing_is_written_before_a_command_that_cannot_work_is_refused(tmp_path, words, said):
    assert said in refused(*ONE, *words, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_options_of_which_a_search_decides_itself_are_unknown(tmp_path):
    for option in ("--vary", "--class-order", "--class-order-seed", "--partition-seed"):
        done = CliRunner().invoke(main, [*ONE, "--methods", "fedncm", option, "3", "--out", str(tmp_path)])
        assert done.exit_code == 2 and "fczoo tune: no such option" in done.output and option in done.output


def test_where_no_trial_succeeds_the_reason_is_said_and_others_are_kept(tmp_path, scored):
    def diverging(method: Any) -> float:
        if method.name == "fedavg":
            raise FczooError("it diverged")
        return 50.0

    scored(diverging)
    done = CliRunner().invoke(main, [*ONE, "--methods", "fedavg,fedncm", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "fedavg: trial 1 of 1, failed: it diverged",
        "fedncm: trial 1 of 1, 50.0 %",
        "Error: no trial of fedavg succeeded, the last one: it diverged; the others are in "
        f"{tmp_path / TUNED}",
    ]
    assert list(read_tuned(tmp_path / TUNED).methods) == ["fedncm"]


def test_where_clients_are_too_few_no_trial_begins(tmp_path):
    said = refused(*ONE, "--methods", "fedncm", "--min-clients", "50", "--out", str(tmp_path))
    assert "--min-clients 50 is more than the " in said and not (tmp_path / TUNED).exists()


def test_a_trial_that_fails_is_never_the_best(tmp_path, scored):
    """Neither where the others score 0, too."""

    def broken_but_at_one(method: Any) -> float:
        if method.ridge != 1e4:
            raise FczooError("broken")
        return 0.0

    scored(broken_but_at_one)
    words = ["--methods", "fedridge", *TINY, "--trials", "4", "--out", str(tmp_path)]
    assert "  failed  " in run("tune", *words)
    found = read_tuned(tmp_path / TUNED).methods["fedridge"]
    assert found.values == {"normalise": False, "ridge": 1e4} and found.score == 0
    assert [trial.get("error") for trial in found.trials] == ["broken", "broken", "broken", None]


@pytest.mark.parametrize("words", [["--partition", "overlap:0.6"], ["--moving", "1"], []])
def test_image_steps_are_those_of_a_dry_run(tmp_path, scored, words):
    """Of all tasks but for the fifth that is held out: 8 images a class, 2 of them held out."""
    scored(lambda method: 50.0)
    steps = searched(tmp_path, "--methods", "fedncm", "--trials", "1", *words).image_steps
    orders = ["--train-per-class", "6", "--class-order-seed", "1000000", "--partition-seed", "1000000"]
    dry = run("bench", "--methods", "fedncm", *TINY, *orders, *words, "--dry-run")
    (line,) = [line for line in dry.splitlines() if line.startswith("Image-steps")]
    assert line.endswith(f" {steps}")
    assert (steps > 60) == bool(words)


def test_the_first_tasks_are_as_many_as_there_are(tmp_path, scored):
    scored(lambda method: 50.0)
    two = ["--methods", "fedncm", "--tasks", "2", "--trials", "1", "--out", str(tmp_path)]
    assert "after the first 2 tasks, on" in run("tune", *TINY, *two)
    assert read_tuned(tmp_path / TUNED).effort["tasks"] == 2
    place = URL.create("sqlite", database=str(tmp_path / "fedncm.db")).render_as_string()
    study = optuna.load_study(study_name="fedncm", storage=place)
    search = study.user_attrs["search"]
    study.set_user_attr("search", {**search, "effort": {**search["effort"], "tasks": 3}})
    run("tune", *TINY, *two)  # as an earlier version wrote it


def test_a_large_seed_and_a_folder_with_a_sign_of_addresses(tmp_path):
    out = tmp_path / "a?b {c} 50%41"
    searched(out, "--methods", "fedncm", "--trials", "1", "--seed", "5000000")
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]
    assert (out / "fedncm.db").is_file() and trials_kept(out, "fedncm") == 1


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_damaged_search_is_named(tmp_path, scored, kept):
    scored(lambda method: 50.0)
    searched(tmp_path, "--methods", "fedncm", "--trials", "1")
    file = tmp_path / "fedncm.db"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))] + b"damaged" * 1000)
    said = refused(*ONE, "--methods", "fedncm", "--out", str(tmp_path))
    assert f"{file} holds no trials that can be read: " in said and "give another --out" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"effort": {}}, "effort: Object missing required field `trials`"),
        ({"settings": {}}, "settings name no dataset"),
        (
            {"space": {"nope": [1, 2, "log"]}},
            "has values of fedncm.nope, an option that fedncm",
        ),
    ],
)
def test_a_sealed_file_that_cannot_be_used_is_named(tmp_path, scored, change, said):
    scored(lambda method: 50.0)
    searched(tmp_path, "--methods", "fedncm", "--trials", "1")
    content = json.loads((tmp_path / TUNED).read_text())
    if "space" in change:
        content["methods"]["fedncm"] |= change
    else:
        content |= change
    write_record(tmp_path / TUNED, FORMAT, {k: v for k, v in content.items() if k != "sha256"})
    message = refused("bench", "--methods", "fedncm", *TINY, "--tuned", str(tmp_path / TUNED))
    assert str(tmp_path / TUNED) in message and said in message


def test_a_file_of_before_images_that_score_could_be_others_is_read(tmp_path, scored):
    scored(lambda method: 50.0)
    searched(tmp_path, "--methods", "fedncm", "--trials", "1")
    content = json.loads((tmp_path / TUNED).read_text())
    del content["effort"]["score_per_class"], content["sha256"], content["format"]
    (tmp_path / TUNED).write_text(json.dumps(content))
    assert read_tuned(tmp_path / TUNED).effort["trials"] == 1
