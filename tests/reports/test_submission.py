"""``fczoo submit``: runs are added to an archive once; each fault of a folder is reported."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fczoo.cli.app import main
from fczoo.core.files import content_sha256, write_json
from fczoo.reports.runs import read_experiments
from helpers_cli import TINY


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    """Run two methods with two seeds and return their folder."""
    folder = tmp_path_factory.mktemp("submission") / "mine"
    words = ["bench", "--methods", "fedncm,fedridge", "--seeds", "0,1", *TINY, "--out", str(folder)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(shared_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_folder, tmp_path / "mine"))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "results" / "results.csv"


def run_submit(folder: Path, archive: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["submit", str(folder), "--into", str(archive), *words])


ONLY_ACCURACY: dict[str, Any] = {
    "metrics": {},
    **{key: [] for key in ("task_aware", "next_accuracy", "top5", "calibration")},
    **{key: [] for key in ("class_accuracy", "client_accuracy", "confusion", "curve")},
}
"""Empty values of the other evaluation fields, as in files of older versions."""


def change_and_seal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file of a run and write a valid checksum."""
    content = json.loads(path.read_text())
    change(content)
    write_json(path, {**content, "sha256": content_sha256(content)})


def rows(archive: Path) -> list[dict[str, str]]:
    with archive.open(newline="") as file:
        return list(csv.DictReader(file))


def test_submit_adds_all_runs_of_folder(folder, archive):
    result = run_submit(folder, archive)
    assert result.exit_code == 0 and result.output == f"4 runs entered into {archive}\n"
    assert [(row["folder"], row["method"], row["seed"]) for row in rows(archive)] == [
        ("mine", method, seed) for method in ("fedncm", "fedridge") for seed in "01"
    ]
    (in_archive,), (in_folder,) = read_experiments([archive]), read_experiments([folder])
    assert [line.results[0].accuracy for line in in_archive.lines] == [
        x.results[0].accuracy for x in in_folder.lines
    ]


def test_submit_keeps_old_rows_and_rejects_duplicates(folder, archive, make_run):
    make_run(folder.parent / "other", {"one": {0: 70.0}}, rounds=9)
    words = ["report", str(folder.parent / "other"), "--archive", str(archive)]
    archive.parent.mkdir()
    assert CliRunner().invoke(main, words).exit_code == 0
    (old_row,) = rows(archive)
    assert run_submit(folder, archive).exit_code == 0
    first, *others = rows(archive)
    assert {k: first[k] for k in old_row if k != "sha256"} == {
        k: v for k, v in old_row.items() if k != "sha256"
    }
    content = archive.read_bytes()
    again = run_submit(folder.rename(folder.parent / "again"), archive)
    assert again.exit_code == 1
    assert archive.read_bytes() == content
    assert len(others) == 4
    lines = again.stderr.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("Error: no run of ")
    assert (
        f"seed0 is in {archive} already, as mine/fedncm/seed0; submit a folder without it"
        in lines[0]
    )


def test_duplicate_folder_name_is_rejected(folder, archive, make_run):
    assert run_submit(folder, archive).exit_code == 0
    result = run_submit(
        make_run(folder.parent / "x" / "mine", {"one": {0: 70.0}}, rounds=9), archive
    )
    assert f"{archive} has other runs in a folder called mine; rename this folder" in result.stderr


def test_duplicate_runs_in_one_folder_are_rejected(folder, archive):
    shutil.copytree(folder, folder.parent / "both" / "one")
    shutil.copytree(folder, folder.parent / "both" / "two")
    result = run_submit(folder.parent / "both", archive)
    assert result.exit_code == 1 and not archive.exists()
    assert len([line for line in result.stderr.splitlines() if "is in" in line]) == 4


def test_dry_run_writes_no_archive(folder, archive):
    result = run_submit(folder, archive, "--dry-run")
    assert result.exit_code == 0
    assert result.output == f"4 runs can be entered into {archive}\n"
    assert not archive.exists()


def test_seed_folders_keep_their_names(tmp_path, archive):
    words = [
        "bench",
        "--methods",
        "fedncm",
        "--seeds",
        "0,1",
        "--vary",
        "training,partition",
        *TINY,
    ]
    assert CliRunner().invoke(main, [*words, "--out", str(tmp_path / "mine")]).exit_code == 0
    assert run_submit(tmp_path / "mine", archive).exit_code == 0
    assert [row["folder"] for row in rows(archive)] == ["mine/seed0", "mine/seed1"]


def _drop(path: Path) -> None:
    shutil.rmtree(path)


def add_fraction_of_image(content: dict[str, Any]) -> None:
    content["accuracy"][-1][0] += 25 / content["test_counts"][0]
    content.update(ONLY_ACCURACY)


FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "missing seed",
        lambda f: _drop(f / "fedncm" / "seed1"),
        "fedncm seed 1 is not finished (not started)",
    ),
    (
        "stopped run",
        lambda f: change_and_seal(
            f / "fedncm" / "seed1" / "result.json",
            lambda c: c.update(finished=False, accuracy=c["accuracy"][:1], **ONLY_ACCURACY),
        ),
        "fedncm seed 1 is not finished (stopped after task 1 of 3); continue with `fczoo bench "
        "--resume --out",
    ),
    (
        "no checksum",
        lambda f: write_json(
            f / "bench.json",
            {
                k: v
                for k, v in json.loads((f / "bench.json").read_text()).items()
                if k not in ("sha256", "format")
            },
        ),
        "bench.json has no checksum: an older version or another program wrote it; run it again",
    ),
    (
        "no versions",
        lambda f: change_and_seal(
            f / "fedncm" / "seed0" / "result.json", lambda c: c["versions"].pop("torch")
        ),
        "fedncm/seed0: the versions of torch are not recorded",
    ),
    (
        "different code",
        lambda f: change_and_seal(
            f / "fedncm" / "seed0" / "result.json", lambda c: c["versions"].update(code="0" * 64)
        ),
        "fedncm/seed0: the code hash of its result differs from that in bench.json",
    ),
    (
        "changed code",
        lambda f: change_and_seal(
            f / "bench.json", lambda c: c.update(changed_code=[{"when": "today", "modules": []}])
        ),
        "the code changed between its runs (today; --accept-changed-code)",
    ),
    (
        "no image hash",
        lambda f: change_and_seal(f / "bench.json", lambda c: c["data"].clear()),
        "fedncm/seed0: the hash of its images is not recorded",
    ),
    (
        "different settings",
        lambda f: change_and_seal(
            f / "fedncm" / "seed0" / "result.json", lambda c: c["settings"].update(rounds=7)
        ),
        "fedncm/seed0: files disagree on settings rounds; submit the unchanged files of one fczoo "
        "bench command",
    ),
    (
        "different options",
        lambda f: change_and_seal(
            f / "fedridge" / "seed0" / "result.json", lambda c: c["options"].update(ridge=7.0)
        ),
        "fedridge/seed0: files disagree on options; submit",
    ),
    (
        "different tasks",
        lambda f: change_and_seal(
            f / "fedncm" / "seed0" / "result.json",
            lambda c: c.update(task_sizes=[3, 4, 3], metrics={}),
        ),
        "fedncm/seed0: tasks of [3, 4, 3] classes, but its settings make [4, 3, 3]; run it again",
    ),
    (
        "no bytes sent",
        lambda f: change_and_seal(
            f / "fedncm" / "seed0" / "result.json", lambda c: c.update(bytes_up=0, metrics={})
        ),
        "fedncm/seed0: bytes_up is 0, but the entries of its field 'uploaded' add up to ",
    ),
    (
        "fraction of an image",
        lambda f: change_and_seal(f / "fedncm" / "seed0" / "result.json", add_fraction_of_image),
        "fedncm/seed0: an accuracy does not match a whole number of test images",
    ),
]


@pytest.mark.parametrize(
    ("change", "says"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_each_fault_is_rejected(change, says, folder, archive):
    change(folder)
    result = run_submit(folder, archive)
    refusals = [line for line in result.stderr.splitlines() if line.startswith("refused: ")]
    assert result.exit_code == 1 and any(says in line for line in refusals), result.stderr
    assert len(refusals) + 1 == result.stderr.count("\n") and not archive.exists()


def test_damaged_file_is_rejected(folder, archive):
    path = folder / "fedncm" / "seed0" / "result.json"
    path.write_text(path.read_text().replace('"bytes_up": ', '"bytes_up": 1'))
    result = run_submit(folder, archive)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "its content does not match its sha256; it was changed or is damaged" in result.stderr


def test_incomplete_search_record_is_rejected(folder, archive):
    change_and_seal(
        folder / "bench.json", lambda c: c.update(tuned={"methods": ["fedncm"], "trials": 9})
    )
    result = run_submit(folder, archive)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "bench.json is not a valid" in result.stderr
    assert "tuned lacks dataset, image_steps, tasks" in result.stderr


def test_images_other_than_archive_are_rejected(folder, archive):
    assert run_submit(folder, archive).exit_code == 0
    for method in ("fedncm", "fedridge"):
        _drop(folder / method / "seed1")
    second = folder.rename(folder.parent / "other")
    change_and_seal(second / "bench.json", lambda c: c.update(seeds=[0], data={"sha256": "5" * 64}))
    result = run_submit(second, archive)
    message = f"SHA-256 of images (555555555555) differs from that of mine in {archive}"
    assert result.exit_code == 1
    assert message in result.stderr
    assert "`fczoo data check digits`" in result.stderr


def test_test_image_count_must_match_published_count(folder, archive):
    """Compare the number of test images with the published one.

    With four test images per class of CIFAR-10, tasks of 4, 3 and 3 classes have 16, 12 and 12.
    """

    def set_cifar10(content: dict[str, Any]) -> None:
        content["settings"]["dataset"] = "cifar10"

    change_and_seal(folder / "bench.json", set_cifar10)
    partition = json.loads((folder / "partition.json").read_text())
    for path in folder.glob("*/*/result.json"):
        change_and_seal(path, set_cifar10)
    assert "test images per task, but cifar10" not in run_submit(folder, archive).stderr
    path = folder / "fedncm" / "seed0" / "result.json"
    change_and_seal(path, lambda c: c.update(test_counts=[16, 12, 11], **ONLY_ACCURACY))
    result = run_submit(folder, archive)
    assert (
        "fedncm/seed0: [16, 12, 11] test images per task, but cifar10 has [16, 12, 12] with these "
        "settings" in result.stderr
    )
    assert partition["dataset"] == "digits"
    assert "files disagree on data set of the partition" in result.stderr


def test_archive_folder_is_rejected(folder, archive):
    assert run_submit(folder, archive).exit_code == 0
    result = run_submit(archive.parent, archive)
    assert result.exit_code == 1
    assert "is not a run folder; give the folder that fczoo bench wrote" in result.stderr


# --- rows of a suite

SUITE = """
question = "Does a mean need a covariance?"
[bench]
dataset = "digits"
train_per_class = 8
test_per_class = 4
rounds = 1
epochs = 1
tasks = 3
clients = 3
seeds = "0-1"
[[rows]]
method = "fedncm"
"""


@pytest.fixture
def suite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a suite with the settings of the folder's runs, below the current folder."""
    monkeypatch.chdir(folder.parent)
    file = folder.parent / "results/suites/means.toml"
    file.parent.mkdir(parents=True)
    file.write_text(SUITE)
    return file


def submit_rows(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["submit", str(folder), "--suite", "means", *words])


def test_submit_adds_runs_as_suite_rows(folder: Path, suite: Path) -> None:
    """Add runs of an existing row, and of a method that becomes a new row."""
    assert submit_rows(folder, "--dry-run").exit_code == 0
    assert suite.read_text() == SUITE
    result = submit_rows(folder)
    assert result.output == f"4 runs entered into {Path('results/means.csv')}\n"
    entered = [row["folder"] for row in rows(suite.parents[1] / "means.csv")]
    assert entered == [f"{m}/seed{seed}" for m in ("fedncm", "fedridge") for seed in (0, 1)]
    assert suite.read_text() == f'{SUITE}\n[[rows]]\nmethod = "fedridge"\n'
    status = CliRunner().invoke(main, ["suite", "status", "means"])
    assert "4 current" in status.output
    again = submit_rows(folder)
    assert again.exit_code == 1
    assert "is in results/means.csv already" in again.stderr


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("epochs = 1", "epochs = 2", "its settings do not match suite means"),
        (
            'method = "fedncm"',
            'method = "fedncm"\nset = {distance = "cosine"}',
            "its options do not match suite means",
        ),
        ("[bench]", "trials = 2\n[bench]", "its search does not match suite means"),
        ('"0-1"', '"0-2"', "fedncm: seed 2 of the suite is missing"),
        ('"0-1"', '"1-2"', "its seed does not match suite means"),
    ],
)
def test_mismatched_suite_runs_are_rejected(
    folder: Path, suite: Path, old: str, new: str, problem: str
) -> None:
    suite.write_text(SUITE.replace(old, new))
    result = submit_rows(folder)
    assert result.exit_code == 1
    assert problem in result.stderr
    assert "Traceback" not in result.output
    assert not (suite.parents[1] / "means.csv").exists()
    assert suite.read_text() == SUITE.replace(old, new)


def test_suite_and_into_options_conflict(folder: Path, suite: Path) -> None:
    result = submit_rows(folder, "--into", "other.csv")
    assert result.stderr == "Error: --suite and --into each name an archive; give one of them\n"
