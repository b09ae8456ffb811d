"""Test ``fczoo new``: every kind of plug-in is written, installed, listed and run."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from helpers_warm import warm_python

RUN_OPTIONS = shlex.split("""
    --methods my_method --partition my_partitioner:2 --dataset my_dataset --data-root data
    --augment my_augmentation:0.5 --backbone my_backbone
    --aggregator my_aggregator:0.2 --attack my_attack:0.2 --attackers 0.5
    --train-per-class 6 --test-per-class 2 --tasks 2 --clients 2 --rounds 1 --epochs 1 --out run
""")  # a run that uses all kinds
KINDS = (
    *("method", "partitioner", "aggregator", "attack", "dataset"),
    *("backbone", "augmentation", "metric"),
)

LIST = """
import sys
from fczoo.cli.app import main
for kind in sys.argv[1:]:
    main(["list", kind], standalone_mode=False)
"""
"""Program that lists the parts of each kind."""


def python(*arguments: str, cwd: Path, site: Sequence[Path] = ()) -> str:
    """Run Python with these arguments; return what it prints.

    Args:
        arguments: Words after the interpreter.
        cwd: Folder in which it runs.
        site: Folders of packages to import.
    """
    environment = {**os.environ, "FCZOO_HOME": str(cwd / "home")}
    if site:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, site))
    command = [warm_python(), *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_new_plugins_are_installed_listed_and_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    site, folders = tmp_path / "site", [tmp_path / f"fczoo-my-{kind}" for kind in KINDS]
    for kind, folder in zip(KINDS, folders, strict=True):
        outcome = CliRunner().invoke(main, ["new", kind, f"my_{kind}"])
        name = folder.name
        message = f"Written to {name}. Next: pip install -e {name} && pytest {name}\n"
        assert outcome.output == message
        files = {f"fczoo_my_{kind}.py", f"test_my_{kind}.py", "pyproject.toml"}
        assert {path.name for path in folder.iterdir()} == files
    # the tests of the other kinds run with the handbook's tutorial on parts
    test = ["-m", "pytest", "-p", "no:cacheprovider", "fczoo-my-method/test_my_method.py"]
    assert " passed" in python(*test, cwd=tmp_path, site=folders)

    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    python("-m", "pip", "install", *options, *map(str, folders), cwd=tmp_path)
    lists = python("-c", LIST, *[f"{kind}s" for kind in KINDS], cwd=tmp_path, site=[site])
    for kind in KINDS:
        assert f"my_{kind}" in lists
    write = (
        "from pathlib import Path; from test_my_dataset import imitation; "
        "imitation(Path('../data'))"
    )
    python("-c", write, cwd=tmp_path / "fczoo-my-dataset")
    output = python("-m", "fczoo", "bench", *RUN_OPTIONS, cwd=tmp_path, site=[site])
    assert "Written to run" in output
    assert (tmp_path / "run" / "bench.json").is_file()
    report = ["-m", "fczoo", "report", "run", "--metrics", "my_metric"]
    assert "Accuracy of the task" in python(*report, cwd=tmp_path, site=[site])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Mine",
            "'Mine' is not a valid name of a partitioner; use lower-case letters, digits and "
            "single _ between them",
        ),
        ("../mine", "'../mine' is not a valid name of a partitioner"),
        ("mine_", "'mine_' is not a valid name of a partitioner"),
        ("iid", "there is a partitioner called iid already; choose another name"),
        ("none", "'none' is not a valid name of a partitioner: Python or the template uses None"),
        ("mine", "fczoo-mine exists already; remove it or choose another folder with --out"),
    ],
)
def test_invalid_names_are_rejected_with_one_line(
    name: str, says: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fczoo-mine").mkdir()
    outcome = CliRunner().invoke(main, ["new", "partitioner", name])
    assert outcome.exit_code == 1
    assert says in outcome.output
    assert outcome.output.count("\n") == 1
    assert not list(Path("fczoo-mine").iterdir())
    assert len(list(Path().iterdir())) == 1


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("backbone", "vit_nano_32", "there is a backbone called vit_nano_32 already"),
        ("backbone", "vit_base_patch14_dinov2", "called vit_base_patch14_dinov2 already"),
        ("metric", "faa", "there is a metric called FAA already"),
        ("augmentation", "flip", "there is an augmentation called flip already"),
        ("augmentation", "Mine", "'Mine' is not a valid name of an augmentation"),
    ],
)
def test_builtin_or_invalid_names_are_rejected(kind, name, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["new", kind, name])
    assert outcome.exit_code == 1 and says in outcome.output
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("kind", "name"), [("method", "optim"), ("dataset", "defaults")])
def test_names_used_by_template_are_rejected(kind: str, name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["new", kind, name])
    assert outcome.exit_code == 1
    assert "Python or the template uses " in outcome.output
    assert not list(Path().iterdir())
