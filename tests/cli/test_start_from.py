"""Test ``fczoo bench --start-from``: runs that continue from a stored model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import fczoo
from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from fczoo.federation.model_record import read_model_record
from fczoo.reports.runs import read_experiments
from helpers_cli import TINY, run

COLOURS = np.random.default_rng(0).integers(0, 255, (6, 3))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two methods on four tasks of digits; keep the model of each task."""
    out = tmp_path_factory.mktemp("first") / "first"
    words = ("--methods", "fedncm,fedclm", *TINY, "--tasks", "3,3,2,2")
    run("bench", *words, "--keep-model", "tasks", "--out", str(out))
    return out


@pytest.fixture
def image_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write images of three classes, of two others a year later, and of all five in one folder."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(1)
    for number, name in enumerate("abcde"):
        for part in ("train", "test"):
            for i in range(6):
                pixels = np.clip(COLOURS[number] + rng.integers(-60, 60, (32, 32, 3)), 0, 255)
                for year in ("all", "year1" if name in "abc" else "year2"):
                    folder = tmp_path / year / part / name
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return tmp_path


def result_of(folder: Path) -> dict:
    content: dict = json.loads((folder / "result.json").read_text())
    return content


def error_of(*words: str, out: Path) -> str:
    """Run a bench that must fail with one line and write nothing; return the line."""
    outcome = CliRunner().invoke(main, ["bench", *words, "--out", str(out)])
    assert outcome.exit_code == 1, outcome.output
    assert not out.exists(), outcome.stderr
    *earlier, line = outcome.stderr.splitlines()
    assert all("decoding" in text for text in earlier), outcome.stderr
    return line


def bench_folder(root: Path, out: Path, *words: str) -> Path:
    """Run FedNCM on a folder of images."""
    small = [
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--clients",
        "2",
        "--partition",
        "iid",
        "--protocol",
        "none",
    ]
    names = ["--methods", "fedncm", "--dataset", "imagefolder", "--data-root", str(root)]
    sizes = ["--backbone", "vit_nano_32", "--stored-size", "32"]
    run("bench", *names, *small, *sizes, *words, "--out", str(out))
    return out / "fedncm" / "seed0"


@pytest.mark.parametrize("method", ["fedncm", "fedclm"])
def test_continued_run_matches_uninterrupted_run(method, first, tmp_path):
    model = first / method / "seed0" / "task2"
    text = run("bench", "--start-from", str(model), "--out", str(tmp_path / "next"))
    run_folder = tmp_path / "next" / method / "seed0"
    uninterrupted, continued = result_of(first / method / "seed0"), result_of(run_folder)
    assert (
        continued["accuracy"] == uninterrupted["accuracy"] and len(uninterrupted["accuracy"]) == 4
    )
    assert continued["task_aware"][2:] == uninterrupted["task_aware"][2:]
    assert continued["metrics"]["A_N"] == uninterrupted["metrics"]["A_N"]
    assert continued["partition"] == uninterrupted["partition"]
    assert "4 tasks of 2 to 3 classes (the first 2 learned by the kept model task2)" in text
    assert next(line for line in text.splitlines() if line[:6] == "method").split()[1:4] == [
        *("A_N", "old", "new")
    ]
    row, counts = uninterrupted["accuracy"][3], uninterrupted["test_counts"]
    old, new = (
        [n * a for n, a in zip(counts[p], row[p], strict=True)] for p in (slice(2), slice(2, 4))
    )
    assert continued["metrics"]["old"] == pytest.approx(sum(old) / sum(counts[:2]))
    assert continued["metrics"]["new"] == pytest.approx(sum(new) / sum(counts[2:]))
    kept, again = (read_model_record(p) for p in (first / method / "seed0", run_folder))
    assert again.files == kept.files and again.classes == kept.classes
    assert continued["start"]["model"] == f"{method}/seed0/task2"
    assert continued["start"]["tasks"] == 2 and "start_from" not in uninterrupted["settings"]
    assert continued["settings"]["start_from"] == "task2"
    assert [point[0] for point in continued["curve"]] == [2, 3]
    assert run("evaluate", str(run_folder)).startswith(
        f"A_N {uninterrupted['metrics']['A_N']} (as in the run)"
    )


def test_models_of_run_folder_continue_with_other_tasks(first, tmp_path):
    for method in ("fedncm", "fedclm"):  # a run folder whose models know six classes
        shutil.copytree(first / method / "seed0" / "task2", tmp_path / "base" / method / "seed0")
    words = ["--start-from", str(tmp_path / "base"), "--tasks", "1,3", "--epochs", "2"]
    text = run("bench", *words, "--out", str(tmp_path / "next"))
    assert {"fedncm", "fedclm"} <= {line.split(" ")[0] for line in text.splitlines()}
    result = result_of(tmp_path / "next/fedclm/seed0")
    assert result["task_sizes"] == [3, 3, 1, 3] and result["settings"]["epochs"] == 2
    assert result["accuracy"][:2] == result_of(first / "fedclm/seed0")["accuracy"][:2]
    model_bytes = (tmp_path / "next/fedncm/seed0/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "next" / "fedncm")
    run("bench", "--resume", "--out", str(tmp_path / "next"))
    assert (tmp_path / "next/fedncm/seed0/model.safetensors").read_bytes() == model_bytes
    seeds = ["--methods", "fedncm", "--seeds", "0-1"]
    line = error_of("--start-from", str(tmp_path / "base"), *seeds, out=tmp_path / "refused")
    assert "has no model of fedncm with seed 1; give the folder of one model" in line
    plan = run("bench", "--start-from", str(tmp_path / "base/fedncm/seed0"), *seeds, "--dry-run")
    assert "Settings of 2 runs, seeds 0, 1" in plan and "start_from" in plan


def test_new_image_folder_continues_model(image_root):
    year1 = bench_folder(image_root / "year1", image_root / "run1", "--tasks", "1")
    words = ["--start-from", str(year1), "--data-root", str(image_root / "year2")]
    run("bench", *words, "--out", str(image_root / "run2"))
    year2 = image_root / "run2" / "fedncm" / "seed0"
    uninterrupted = result_of(
        bench_folder(image_root / "all", image_root / "run", "--tasks", "3,2")
    )
    assert (
        result_of(year2)["accuracy"] == uninterrupted["accuracy"]
    )  # its means do not depend on the split
    assert result_of(year2)["test_counts"] == [18, 12]
    record = read_model_record(year2)
    assert (
        record.classes == list("abcde")
        and str(image_root) not in (year2 / "model.json").read_text()
    )
    assert "(as in the run)" in run("evaluate", str(year2))
    prediction = run(
        "predict", str(year2), str(image_root / "year2/test/e/0.png"), "--format", "json"
    )
    assert {entry["class"] for entry in json.loads(prediction)[0]["classes"]} == set("abcde")
    # a third year: the tasks of both models are tested
    (image_root / "year3").mkdir()
    for part in ("train", "test"):
        shutil.copytree(image_root / "year1" / part / "a", image_root / "year3" / part / "f")
    words = ["--start-from", str(year2), "--data-root", str(image_root / "year3")]
    run("bench", *words, "--out", str(image_root / "run3"))
    third = result_of(image_root / "run3" / "fedncm" / "seed0")
    assert third["task_sizes"] == [3, 2, 1] and third["accuracy"][:2] == uninterrupted["accuracy"]
    for folder, words, says in (
        ("all", (), "has already learned a, b, c;"),
        ("year1", (), "already learned all 3 classes of imagefolder"),
        ("year2", ("--stored-size", "40"), "give --stored-size 32"),
        ("none", (), "no folder"),
    ):
        arguments = [
            "--start-from",
            str(year1),
            "--data-root",
            str(image_root / folder),
            *words,
        ]
        assert says in error_of(*arguments, out=image_root / "refused")
    shutil.rmtree(image_root / "year1")
    arguments = ["--start-from", str(year1), "--data-root", str(image_root / "year2")]
    assert "also needs the test images of the model" in error_of(
        *arguments, out=image_root / "refused"
    )


def test_added_class_folders_become_next_task(image_root):
    year1 = bench_folder(image_root / "year1", image_root / "run1", "--tasks", "2")
    for part in ("train", "test"):  # in the natural order they would come first
        for name in "de":
            shutil.copytree(
                image_root / "year2" / part / name, image_root / "year1" / part / f"A{name}"
            )
    run("bench", "--start-from", str(year1), "--out", str(image_root / "run2"))
    record = read_model_record(image_root / "run2/fedncm/seed0")
    assert record.classes == ["a", "b", "c", "Ad", "Ae"]
    assert result_of(image_root / "run2/fedncm/seed0")["task_sizes"] == [2, 1, 2]
    (image_root / "year1/test/a/0.png").unlink()
    line = error_of("--start-from", str(year1), out=image_root / "refused")
    assert "now have [11, 6] test images, not [12, 6]" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "fedavg"], "has no model of fedavg, only of fedclm"),
        (["--protocol", "quick"], "needs --protocol none, as in the run of the model"),
        (["--vary", "partition"], "does not work with --vary"),
        (["--moving", "1"], "does not work with --moving"),
        (["--tuned", "some.json"], "--start-from and --tuned both set options"),
        (["--tasks", "9"], "the new part of digits has 4 classes"),
        (["--set", "fedclm.distance=cosine"], "only options with decimal numbers"),
        (["--mean", "0.1,0.2,0.3"], "the backbone of the model in"),
        (["--test-per-class", "2"], "have [6, 6] test images, not [12, 12]"),
    ],
)
def test_incompatible_options_are_rejected(words, says, first, tmp_path):
    model = str(first / "fedclm" / "seed0" / "task2")
    assert says in error_of("--start-from", model, *words, out=tmp_path / "run")


def test_model_without_server_state_is_rejected(first, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(first / "fedclm" / "seed0" / "task2", model)
    record = json.loads((model / "model.json").read_text())
    (model / "server_state.safetensors").unlink()
    from fczoo.federation import model_record

    kept = read_model_record(model)
    files = {name: sha for name, sha in kept.files.items() if "server" not in name}
    without = model_record.msgspec.structs.replace(kept, files=files)
    model_record.write_model_record(model, without)
    assert record["state"] == without.state
    line = error_of("--start-from", str(model), out=tmp_path / "run")
    assert "needs the server's head.weight" in line and "--no-keep-server-state" in line


def test_library_continues_model(first, tmp_path):
    model = first / "fedncm" / "seed0" / "task3"
    result = fczoo.run("fedncm", start_from=str(model))
    assert result.accuracy == result_of(first / "fedncm/seed0")["accuracy"]
    results = fczoo.bench("fedncm", start_from=str(model), out=tmp_path / "run")
    assert "fedncm" in str(results)
    with pytest.raises(FczooError, match="no folder"):
        fczoo.run("fedncm", start_from=str(tmp_path / "nowhere"))


def test_run_stops_after_given_task(first, tmp_path):
    """Keep the rows of the learned tasks; the model of the stopped run can continue."""
    words = ["--methods", "fedncm", *TINY, "--tasks", "3,3,2,2"]
    out = tmp_path / "stopped"
    text = run("bench", *words, "--stop-after-tasks", "2", "--out", str(out))
    assert "digits: the first 2 tasks of 3 classes, 48 training (8 per class)" in text
    uninterrupted, stopped = result_of(first / "fedncm/seed0"), result_of(out / "fedncm/seed0")
    assert stopped["accuracy"] == uninterrupted["accuracy"][:2] and stopped["task_sizes"] == [3, 3]
    assert stopped["partition"] == uninterrupted["partition"]
    row, counts = stopped["accuracy"][1], stopped["test_counts"]
    mean = (row[0] * counts[0] + row[1] * counts[1]) / (counts[0] + counts[1])
    assert stopped["metrics"]["A_N"] == pytest.approx(mean)
    assert stopped["settings"]["stop_after_tasks"] == 2
    assert len(read_experiments([first, out])) == 2  # no common table
    run("bench", "--start-from", str(out), "--out", str(tmp_path / "next"))
    assert result_of(tmp_path / "next/fedncm/seed0")["accuracy"] == uninterrupted["accuracy"]
    plan = run("bench", *words, "--stop-after-tasks", "2", "--dry-run")
    assert "by task: 24 + 24 = 48" in plan


@pytest.mark.parametrize(
    "words", [["--stop-after-tasks", "5"], ["--stop-after-tasks", "2", "--moving", "1"]]
)
def test_invalid_stop_after_tasks_is_rejected(words, tmp_path):
    options = ["--methods", "fedncm", *TINY, "--tasks", "3,3,2,2"]
    line = error_of(*options, *words, out=tmp_path / "refused")
    expected = "--stop-after-tasks is 5, but the tasks of this run are 1 to 4"
    assert (expected if len(words) == 2 else "does not work with --moving") in line
