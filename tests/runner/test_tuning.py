"""Test ``fczoo tune``: held-out images, equal effort, and tuned values in ``bench``."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from click.testing import CliRunner

from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS
from fczoo.federation.data_setup import whole_stream
from fczoo.reports.drawing import COLOURS, write_importance
from fczoo.runner.run_control import lock_folder
from fczoo.runner.tuned_file import TUNED_FILE, Effort, read_tuned
from fczoo.runner.tuning_trials import trial_images
from helpers_cli import run

TINY = ["--train-per-class", "20", "--rounds", "1", "--epochs", "1", "--clients", "3"]
EFFORT = Effort(trials=16, tasks=2, held_out=0.2, seed=0)


def error_line(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code != 0
    assert len(result.output.strip().splitlines()) == 1
    return result.output


@pytest.fixture(scope="module")
def search_folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tuning")
    run("tune", "--methods", "fedncm,fedridge", "--trials", "3", *TINY, "--out", str(out))
    return out


def test_trials_score_on_held_out_training_images():
    settings = Settings.for_dataset("digits", train_per_class=20, class_order_seed=7)
    stream, part = whole_stream(settings), trial_images(settings, EFFORT)
    assert [task.size for task in part.tasks] == [2, 2] and part.tasks[0].classes == 4
    assert np.bincount(part.train.labels).tolist() == [16] * 4
    assert np.bincount(part.test.labels).tolist() == [4] * 4
    position = {number: i for i, number in enumerate(stream.train_index)}
    for number, pixels in zip(part.train_index, part.train.pixels, strict=True):
        assert (stream.train.pixels[position[number]] == pixels).all()
    training_images = {pixels.tobytes() for pixels in part.train.pixels}
    all_images = {pixels.tobytes() for pixels in stream.train.pixels}
    held_out = {pixels.tobytes() for pixels in part.test.pixels}
    assert held_out <= all_images
    assert len(training_images | held_out) == 80  # no image is in both


def test_score_per_class_takes_images_beyond_training():
    settings = Settings.for_dataset("digits", train_per_class=20)
    part = trial_images(settings, replace(EFFORT, score_per_class=30))
    assert np.bincount(part.train.labels).tolist() == [20] * 4
    assert np.bincount(part.test.labels).tolist() == [30] * 4
    training_images = {pixels.tobytes() for pixels in part.train.pixels}
    assert not training_images & {pixels.tobytes() for pixels in part.test.pixels}
    first = whole_stream(Settings.for_dataset("digits", train_per_class=50)).train_index
    assert set(part.train_index) <= set(first)
    all_images = trial_images(Settings.for_dataset("digits"), replace(EFFORT, score_per_class=30))
    assert np.bincount(all_images.test.labels).tolist() == [30] * 4
    with pytest.raises(FczooError, match="but a search would hold out 10000"):
        trial_images(settings, replace(EFFORT, score_per_class=10_000))


def test_methods_have_equal_trials_starting_from_defaults(search_folder):
    search = read_tuned(search_folder / TUNED_FILE)
    assert search.image_steps == 3 * 2 * 16  # three tasks of two classes of sixteen images, once
    for name, method in search.methods.items():
        assert len(method.trials) == 3
        assert method.trials[0]["score"] == method.default_score
        assert method.score == max(trial["score"] for trial in method.trials)
        assert set(method.values) == set(spaces(METHODS.get(name)))
    assert search.methods["fedncm"].trials[0]["values"] == {
        "distance": "euclid",
        "normalise": False,
    }


def test_resumed_search_equals_uninterrupted_search(search_folder, tmp_path):
    short = ["tune", "--methods", "fedridge", *TINY, "--out", str(tmp_path)]
    run(*short, "--trials", "1")
    run(*short, "--trials", "3")
    assert (
        read_tuned(tmp_path / TUNED_FILE).methods["fedridge"]
        == read_tuned(search_folder / TUNED_FILE).methods["fedridge"]
    )


@pytest.mark.parametrize("begun", [0, 1])
def test_search_killed_in_first_trial_restarts_from_defaults(search_folder, tmp_path, begun):
    study = optuna.create_study(
        storage=f"sqlite:///{tmp_path / 'fedridge.db'}", study_name="fedridge", direction="maximize"
    )
    study.enqueue_trial(
        read_tuned(search_folder / TUNED_FILE).methods["fedridge"].trials[0]["values"]
    )
    for _ in range(begun):
        study.ask()  # as if killed before drawing any value
    run("tune", "--methods", "fedridge", *TINY, "--trials", "3", "--out", str(tmp_path))
    assert (
        read_tuned(tmp_path / TUNED_FILE).methods["fedridge"]
        == read_tuned(search_folder / TUNED_FILE).methods["fedridge"]
    )


def test_set_string_value_is_not_read_as_scale(tmp_path):
    words = ["--set", "fedridge.score=linear", "--out", str(tmp_path)]
    run("tune", "--methods", "fedridge", *TINY, "--trials", "1", *words)
    assert read_tuned(tmp_path / TUNED_FILE).methods["fedridge"].values["score"] == "linear"


def test_importance_figure_shows_option_shares(tmp_path):
    from PIL import Image

    write_importance(tmp_path / "two.png", {"fedridge": {"ridge": 0.75, "scaled": 0.25}})
    with Image.open(tmp_path / "two.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colours = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in COLOURS[:2]]
    areas = [(pixels == colour).all(1).sum() for colour in colours]
    assert areas[0] / areas[1] == pytest.approx(3, rel=0.1)
    with pytest.raises(FczooError, match="nothing to show"):
        write_importance(tmp_path / "none.png", {"fedridge": {}})
    short = ["tune", "--methods", "fedridge", *TINY, "--out", str(tmp_path / "out")]
    assert "is not an image file" in error_line(*short, "--plot", str(tmp_path / "plot.xyz"))
    missing = str(tmp_path / "nowhere" / "plot.png")
    assert "nowhere; create it first" in error_line(*short, "--plot", missing)
    assert not (tmp_path / "out").exists()


def test_bench_uses_and_reports_tuned_values(search_folder, tmp_path):
    file, out = str(search_folder / TUNED_FILE), tmp_path / "runs"
    text = run("bench", "--methods", "fedncm,fedridge", *TINY, "--tuned", file, "--out", str(out))
    assert "values found by fczoo tune, 3 trials of 96 image-steps each" in text
    about = json.loads((out / "bench.json").read_text())
    assert (
        about["methods"]["fedridge"]["ridge"]
        == read_tuned(search_folder / TUNED_FILE).methods["fedridge"].values["ridge"]
    )
    assert about["tuned"]["methods"] == ["fedncm", "fedridge"]
    made_by = json.loads((out / "fedridge" / "seed0" / "result.json").read_text())["versions"][
        "code"
    ]
    assert read_tuned(search_folder / TUNED_FILE).methods["fedridge"].code == made_by
    run("report", str(out), "--archive", str(tmp_path / "all.csv"))
    assert "values found by fczoo tune" in run("report", str(tmp_path / "all.csv"))


def test_set_option_is_not_reported_as_tuned(search_folder, tmp_path, caplog):
    by_hand = [
        "--tuned",
        str(search_folder / TUNED_FILE),
        "--set",
        "fedridge.ridge=3",
        "--out",
        str(tmp_path / "runs"),
    ]
    text = run("bench", "--methods", "fedncm,fedridge", *TINY, *by_hand)
    assert "so these methods do not count as tuned: fedridge" in caplog.text
    assert "24 images: fedncm\n" in text
    by_hand[-1] = str(tmp_path / "alone")
    assert "fczoo tune" not in run("bench", "--methods", "fedridge", *TINY, *by_hand)


def test_settings_other_than_of_search_are_reported(search_folder, tmp_path, caplog):
    """Warn of settings other than those of the search.

    The device and the number of test images are ignored.
    """
    bench = [
        "bench",
        "--methods",
        "fedncm",
        *TINY,
        "--tuned",
        str(search_folder / TUNED_FILE),
        "--out",
    ]
    same = [
        str(tmp_path / "same"),
        "--test-per-class",
        "3",
        "--device",
        "cpu",
        "--class-order-seed",
        "4",
    ]
    assert "with a separate class order and partition, scored on 24 images: fedncm" in run(
        *bench, *same
    )
    assert "unlike this run" not in caplog.text
    output = run(*bench, str(tmp_path / "other"), "--partition", "iid", "--epochs", "2")
    assert (
        "found with --partition dirichlet:0.5, --epochs 1, unlike this run, and may not fit"
        in caplog.text
    )
    assert "scored on 24 images, with partition=dirichlet:0.5, epochs=1: fedncm" in output


def test_search_folder_is_locked(search_folder):
    content = (search_folder / TUNED_FILE).read_bytes()
    with lock_folder(search_folder):
        message = error_line(
            "tune", "--methods", "fedncm", "--trials", "4", *TINY, "--out", str(search_folder)
        )
    assert "another process is running in" in message
    assert (search_folder / TUNED_FILE).read_bytes() == content


def test_image_steps_count_participating_clients(tmp_path):
    one_of_three = ["--methods", "fedncm", "--trials", "1", *TINY, "--first-tasks", "1"]
    run("tune", *one_of_three, "--participation", "0.34", "--out", str(tmp_path))
    assert read_tuned(tmp_path / TUNED_FILE).image_steps == round(2 * 16 / 3)


def test_methods_all_excludes_other_names(tmp_path):
    message = error_line("tune", "--methods", "all,fedavg", *TINY, "--out", str(tmp_path / "none"))
    assert "--methods all includes every method; leave the other names out" in message
    assert not (tmp_path / "none").exists()


def test_search_warnings_are_logged(tmp_path):
    run(
        "tune",
        "--methods",
        "fedridge",
        "--trials",
        "1",
        *TINY,
        "--clients",
        "12",
        "--out",
        str(tmp_path),
    )
    assert "images of the largest clients were moved" in (tmp_path / "log.txt").read_text()


def test_set_overrides_tuned(search_folder, tmp_path):
    options = [
        "--tuned",
        str(search_folder / TUNED_FILE),
        "--set",
        "fedncm.distance=cosine",
        "--out",
        str(tmp_path / "runs"),
    ]
    run("bench", "--methods", "fedncm", *TINY, *options)
    about = json.loads((tmp_path / "runs" / "bench.json").read_text())
    assert about["methods"]["fedncm"]["distance"] == "cosine"


def test_set_options_are_fixed_in_search(tmp_path):
    head = ["--set", "fedavg.tune=head", "--set", "fedavg.lr_backbone=0.5"]
    run("tune", "--methods", "fedavg", *TINY, "--trials", "3", *head, "--out", str(tmp_path))
    (search,) = read_tuned(tmp_path / TUNED_FILE).methods.values()
    assert search.space["tune"] == ["head"] and search.space["lr_backbone"] == [0.5]
    assert [t["values"]["tune"] for t in search.trials] == ["head"] * 3
    assert len({t["values"]["lr"] for t in search.trials}) == 3
    assert search.values["tune"] == "head" and search.values["lr_backbone"] == 0.5


def test_invalid_tuning_is_rejected(search_folder, tmp_path):
    message = error_line(
        "tune",
        "--methods",
        "fedncm",
        *TINY,
        "--rounds",
        "2",
        "--trials",
        "3",
        "--out",
        str(search_folder),
    )
    assert "tuned.json is from a search with other settings; give another --out" in message
    assert "nope" in error_line("tune", "--methods", "nope", "--out", str(tmp_path))
    options = ["--set", "hgp.lr=1", "--out", str(tmp_path)]
    assert "options of methods that are not searched: hgp; add" in error_line(
        "tune", "--methods", "fedncm", *options
    )
    assert "a class has 1 training image, but a search would hold out 1; raise " in error_line(
        "tune", "--methods", "fedncm", "--train-per-class", "1", "--out", str(tmp_path)
    )
    (tmp_path / "wrong.json").write_text("{}")
    assert "wrong.json" in error_line(
        "bench", "--methods", "fedncm", "--tuned", str(tmp_path / "wrong.json")
    )
