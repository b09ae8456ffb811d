"""Test that a plug-in with an import error is reported and left out."""

import os
import subprocess
from pathlib import Path

import pytest

from helpers_cli import TINY
from helpers_warm import warm_python

BROKEN = """
from fczoo.core.registry import register_dataset, register_method
from fczoo.data.dataset import Dataset

@register_method("sickmethod")
class Sick:
    "A method that no one can use."

@register_dataset("sickdata")
class SickData(Dataset):
    about = "data that no one can read"

undefined_name
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of packages with the plug-in installed."""
    (tmp_path / "sickplugin.py").write_text(BROKEN)
    about = tmp_path / "sick-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sick\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[fczoo.plugins]\nsick = sickplugin\n")
    return tmp_path


def fczoo(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "fczoo", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=site, timeout=300
    )


def test_other_commands_work_with_broken_plugin(site: Path) -> None:
    warning = (
        "plug-in sick (sickplugin) is left out: NameError: name 'undefined_name' is not defined"
    )
    for words in (["list", "methods"], ["list", "quirks"], ["list", "datasets"], ["show", "hgp"]):
        process = fczoo(site, *words)
        assert process.returncode == 0, (words, process.stderr)
        assert "Traceback" not in process.stderr, (words, process.stderr)
    doctor = fczoo(site, "doctor")
    assert doctor.returncode == 0 and doctor.stderr.count(warning) == 1
    assert "sick 1.5, not loaded: NameError" in doctor.stdout
    assert "data sickdata" not in doctor.stdout
    bench = fczoo(site, "bench", "--methods", "fedncm", *TINY)
    assert bench.returncode == 0, bench.stderr
    assert bench.stderr.count(warning) <= 1, bench.stderr


def test_names_of_broken_plugin_are_rejected_with_reason(site: Path) -> None:
    for words in (
        ["bench", "--methods", "sickmethod"],
        ["show", "sickmethod"],
        ["partition", "--dataset", "sickdata"],
    ):
        process = fczoo(site, *words)
        assert process.returncode == 1, (words, process.stderr)
        assert "Traceback" not in process.stderr, (words, process.stderr)
        assert (
            "is in sickplugin, which cannot be imported: NameError: name 'undefined_name'"
            in process.stderr
        )
