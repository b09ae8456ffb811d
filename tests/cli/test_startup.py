"""What only looks something up starts at once: nothing heavy is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchvision import datasets

from fczoo.core.registry import DATASETS, METHODS

LOOKED_UP = """
import sys
from click.testing import CliRunner
from fczoo.cli.app import main
for words in (
    ["--version"], ["--help"], ["bench", "--help"], ["leaderboard", "--help"], ["submit", "--help"],
    ["site", "start", "--help"],
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
SPLIT = """
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
SHOWN = """
import sys
from click.testing import CliRunner
from fczoo.cli.app import main
for words in (
    ["show", "hgp"], ["show", "glfc"], ["show", "ewc"], ["show", "lorm"], ["show", "cifar100"],
    ["show", "dirichlet"], ["show", "settings"],
):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    heavy = {"timm", "sklearn", "torchvision", "matplotlib", "torch._dynamo"}  # with an optimizer: the last
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""


@pytest.mark.parametrize("code", [LOOKED_UP, SPLIT, SHOWN], ids=["looked up", "split", "shown"])
def test_nothing_heavy_is_imported(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def completed(line: str) -> list[str]:
    """What a shell is told to offer for the last word of a line, by the command itself. Whoever presses a key
    waits for it, so that nothing is imported that takes a tenth of a second.
    """
    words = {
        "_FCZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    command = [str(Path(sys.executable).with_name("fczoo"))]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    imported = {entry.rpartition("|")[2].strip() for entry in done.stderr.splitlines()}
    assert "click" in imported and not imported & {"torch", "numpy", "tabulate"}
    return [word.removeprefix("plain,") for word in done.stdout.split()]


def test_a_shell_is_offered_names() -> None:
    methods = [name for name in METHODS.names() if name.startswith("fed")]
    assert completed("fczoo bench --methods fed") == methods and "fedncm" in methods
    assert completed("fczoo bench --methods hgp,fpp") == ["hgp,fppl"]
    assert completed("fczoo bench --dataset cifar") == ["cifar10", "cifar100"]
    assert completed("fczoo bench --protocol pil") == ["pilora"]
    assert completed("fczoo bench --precision b") == ["bf16"]
    assert completed("fczoo show dual") == ["dualprompt"] and completed("fczoo show protocol gl") == ["glfc"]
    assert completed("fczoo list quir") == ["quirks"]


@pytest.mark.skipif(sys.platform == "win32", reason="no bash")
def test_bash_takes_what_the_handbook_says_and_completes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("eval ")]
    words = "COMP_WORDS=(fczoo bench --methods hgp,fpp); COMP_CWORD=3"
    ask = f"{words}; _fczoo_completion fczoo; echo ${{COMPREPLY[@]}}"
    there = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{line}\n{ask}"], env=there, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["hgp,fppl"], done.stderr


def test_facts_written_down_are_those_of_torchvision() -> None:
    """torchvision takes a second to import, so that its addresses
    and checksums stand in the data sets' files.
    """
    for name, reader in (("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)):
        found = DATASETS.get(name)
        (archive,) = found.archives
        assert (archive.url, archive.md5, found.folder) == (reader.url, reader.tgz_md5, reader.base_folder)
    files = [(Path(a.url).name, a.md5) for a in DATASETS.get("fashionmnist").archives]
    assert files == datasets.FashionMNIST.resources
    assert DATASETS.get("fashionmnist").archives[0].url.startswith(datasets.FashionMNIST.mirrors[0])


EXAMPLE = Path(__file__).parents[2] / "results" / "cifar100-reduced-c"


@pytest.mark.parametrize("words", [["claims"], ["papers", "hgp", "T1"], ["report", str(EXAMPLE)]])
def test_on_a_machine_without_utf8_files_are_read_and_a_terminal_shows_what_it_can(words, tmp_path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp437"}
    told = {"env": {**os.environ, **plain}, "cwd": tmp_path, "capture_output": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-m", "fczoo", *words], check=False, **told)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(done.stdout.decode("cp437")) > 1000
