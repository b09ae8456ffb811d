"""``fczoo new``: every kind of plug-in is written, passes its own test, is installed, listed and run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main

SMALL = ["--train-per-class", "6", "--test-per-class", "2", "--tasks", "2", "--clients", "2"]
SMALL += ["--rounds", "1", "--epochs", "1", "--out", "run"]
USED = {  # kind -> how a run uses it
    "method": ["--methods", "mine_too", "--partition", "iid"],
    "partitioner": ["--methods", "fedncm", "--partition", "mine_too:2"],
    "aggregator": ["--methods", "fedavg", "--set", "fedavg.tune=head", "--aggregator", "mine_too:0.2"],
    "attack": [
        "--methods",
        "fedavg",
        "--set",
        "fedavg.tune=head",
        "--attack",
        "mine_too:0.2",
        "--attackers",
        "0.5",
    ],
    "dataset": ["--methods", "fedncm", "--dataset", "mine_too", "--data-root", "data"],
}


def python(*arguments: str, cwd: Path, site: Path | None = None) -> str:
    environment = {**os.environ, "FCZOO_HOME": str(cwd / "home")} | (
        {"PYTHONPATH": str(site)} if site else {}
    )
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", USED)
def test_a_new_plugin_passes_its_test_and_is_seen(kind: str, tmp_path: Path) -> None:
    folder, site = tmp_path / "fczoo-mine-too", tmp_path / "site"
    said = python("-m", "fczoo", "new", kind, "mine_too", cwd=tmp_path)
    assert said == f"Written to {folder.name}. Next: pip install -e {folder.name} && pytest {folder.name}\n"
    files = {"fczoo_mine_too.py", "test_mine_too.py", "pyproject.toml"}
    assert {path.name for path in folder.iterdir()} == files
    assert " passed" in python("-m", "pytest", "-p", "no:cacheprovider", cwd=folder)

    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    python(*install, str(folder), cwd=tmp_path)
    assert "mine_too" in python("-m", "fczoo", "list", f"{kind}s", cwd=tmp_path, site=site)
    if kind == "dataset":
        write = "from pathlib import Path; from test_mine_too import imitation; imitation(Path('../data'))"
        python("-c", write, cwd=folder)
    printed = python("-m", "fczoo", "bench", *USED[kind], *SMALL, cwd=tmp_path, site=site)
    assert "Written to run" in printed and (tmp_path / "run" / "bench.json").is_file()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Mine",
            "'Mine' cannot name a partitioner; take lower-case letters, digits and single _ between them",
        ),
        ("../mine", "'../mine' cannot name a partitioner"),
        ("mine_", "'mine_' cannot name a partitioner"),
        ("iid", "there is a partitioner called iid already; choose another name"),
        ("none", "'none' cannot name a partitioner: None means something else"),
        ("mine", "fczoo-mine exists already; remove it or choose another folder with --out"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(name: str, says: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fczoo-mine").mkdir()
    done = CliRunner().invoke(main, ["new", "partitioner", name])
    assert done.exit_code == 1 and says in done.output and done.output.count("\n") == 1
    assert not list(Path("fczoo-mine").iterdir()) and len(list(Path().iterdir())) == 1


@pytest.mark.parametrize(("kind", "name"), [("method", "optim"), ("dataset", "defaults")])
def test_a_class_never_hides_what_its_module_uses(kind: str, name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["new", kind, name])
    assert done.exit_code == 1 and "means something else; choose another name" in done.output
    assert not list(Path().iterdir())
