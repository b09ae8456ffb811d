"""Test that lookup commands start fast: they import no heavy packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchvision import datasets

from fczoo.core.registry import DATASETS, METHODS

LOOKUP_COMMANDS = """
import sys
from click.testing import CliRunner
from fczoo.cli.app import main
for words in (
    ["--version"], ["--help"], ["bench", "--help"], ["leaderboard", "--help"], ["submit", "--help"],
    ["site", "start", "--help"], ["predict", "--help"], ["evaluate", "--help"], ["cite", "--help"],
    ["export", "--help"],
    ["list"], ["list", "methods"], ["list", "baselines"],
    ["list", "datasets"], ["list", "partitioners"], ["list", "aggregators"], ["list", "attacks"],
    ["list", "protocols"], ["list", "releases"], ["list", "quirks"], ["list", "backbones"],
    ["papers"], ["papers", "hgp"],
    ["show", "protocol"], ["show", "protocol", "hgp"],
    ["bench", "--rouds", "3"],
):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (2 if "--rouds" in words else 0), done.output
    heavy = {"torch", "timm", "sklearn", "scipy", "torchvision", "matplotlib", "huggingface_hub"}
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""
PARTITION_COMMANDS = """
import sys
from click.testing import CliRunner
from fczoo.cli.app import main
for words in (
    ["--clients", "3"], ["--partition", "quantity:2", "--full"],
    ["--partition", "overlap:0.5", "--joining", "1"],
):
    done = CliRunner().invoke(main, ["partition", *words])
    assert done.exit_code == 0, done.output
    heavy = {"torch", "timm", "torchvision", "matplotlib", "huggingface_hub"}
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""
SHOW_COMMANDS = """
import sys
from click.testing import CliRunner
from fczoo.cli.app import main
for words in (
    ["show", "hgp"], ["show", "glfc"], ["show", "ewc"], ["show", "lorm"], ["show", "cifar100"],
    ["show", "dirichlet"], ["show", "settings"],
):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    # An optimizer would import torch._dynamo.
    heavy = {"timm", "sklearn", "torchvision", "matplotlib", "torch._dynamo"}
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""


@pytest.mark.parametrize(
    "code",
    [LOOKUP_COMMANDS, PARTITION_COMMANDS, SHOW_COMMANDS],
    ids=["lookup", "partition", "show"],
)
def test_commands_import_no_heavy_packages(code: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def completions_of(line: str) -> list[str]:
    """Return the completions that the command offers for the last word of a line.

    Completion must be fast, so the command imports no slow packages.
    """
    words = {
        "_FCZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    command = [str(Path(sys.executable).with_name("fczoo"))]
    process = subprocess.run(
        command, env={**os.environ, **words}, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert "Error" not in process.stderr, process.stderr
    modules = {entry.rpartition("|")[2].strip() for entry in process.stderr.splitlines()}
    assert "click" in modules and not modules & {"torch", "numpy", "tabulate"}
    return [candidate.removeprefix("plain,") for candidate in process.stdout.split()]


def test_completion_offers_names() -> None:
    methods = [name for name in METHODS.names() if name.startswith("fed")]
    assert completions_of("fczoo bench --methods fed") == methods
    assert "fedncm" in methods
    assert completions_of("fczoo bench --methods hgp,fpp") == ["hgp,fppl"]
    assert completions_of("fczoo bench --dataset cifar") == ["cifar10", "cifar100"]
    assert completions_of("fczoo bench --protocol pil") == ["pilora"]
    assert completions_of("fczoo bench --precision b") == ["bf16"]
    assert completions_of("fczoo show dual") == ["dualprompt"]
    assert completions_of("fczoo show protocol gl") == ["glfc"]
    assert completions_of("fczoo list quir") == ["quirks"]


@pytest.mark.skipif(sys.platform == "win32", reason="no bash")
def test_bash_completion_of_handbook_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("eval ")]
    words = "COMP_WORDS=(fczoo bench --methods hgp,fpp); COMP_CWORD=3"
    ask = f"{words}; _fczoo_completion fczoo; echo ${{COMPREPLY[@]}}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.run(
        ["bash", "-c", f"{line}\n{ask}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout.split() == ["hgp,fppl"], process.stderr


def test_archive_facts_match_torchvision() -> None:
    """Match the addresses and checksums in the data sets' files with torchvision's.

    They are copied, as torchvision takes a second to import.
    """
    for name, reader in (("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)):
        dataset = DATASETS.get(name)
        (archive,) = dataset.archives
        assert (archive.url, archive.md5, dataset.folder) == (
            reader.url,
            reader.tgz_md5,
            reader.base_folder,
        )
    house_numbers = [[a.url, Path(a.url).name, a.md5] for a in DATASETS.get("svhn").archives]
    assert house_numbers == [datasets.SVHN.split_list[part] for part in ("train", "test")]
    (letters,) = DATASETS.get("emnist").archives
    assert (letters.url, letters.md5) == (datasets.EMNIST.url, datasets.EMNIST.md5)
    for split in ("balanced", "letters"):
        names = datasets.EMNIST.classes_split_dict[split]
        cls = DATASETS.get(f"emnist:{split}")
        assert cls.classes == len([name for name in names if name != "N/A"])
    files = [(Path(a.url).name, a.md5) for a in DATASETS.get("fashionmnist").archives]
    assert files == datasets.FashionMNIST.resources
    assert DATASETS.get("fashionmnist").archives[0].url.startswith(datasets.FashionMNIST.mirrors[0])


SUITE_RUNS = Path(__file__).parents[2] / "results" / "frozen.csv"


@pytest.mark.parametrize(
    "words", [["claims"], ["papers", "hgp", "T1"], ["report", str(SUITE_RUNS)]]
)
def test_commands_work_without_utf8_locale(words, tmp_path) -> None:
    plain = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "cp437",
    }
    options = {
        "env": {**os.environ, **plain},
        "cwd": tmp_path,
        "capture_output": True,
        "timeout": 120,
    }
    process = subprocess.run([sys.executable, "-m", "fczoo", *words], check=False, **options)
    assert process.returncode == 0 and not process.stderr, process.stderr
    assert len(process.stdout.decode("cp437")) > 1000
