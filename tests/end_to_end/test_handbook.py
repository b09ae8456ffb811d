"""The handbook: it builds without a warning, has a page for each method, and what its tutorials say works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fczoo.core.registry import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = Path(__file__).with_name("plugin")
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
FILE = re.compile(r"```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)```", flags=re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)```", flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_handbook_builds_without_a_warning(tmp_path):
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} (extra docs) is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    built = {page.stem for page in (tmp_path / "site" / "generated" / "methods").glob("*.html")}
    assert built >= {*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")}
    assert "orthogonal" in (tmp_path / "site" / "generated" / "methods" / "pilora.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_what_a_tutorial_says_works(page: Path, tmp_path: Path) -> None:
    """Its files are written and its commands run in order, in an empty folder."""
    text = page.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    site = tmp_path / "site"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FCZOO_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(site),
        "PIP_TARGET": str(site),  # packages of a tutorial go there, and fetch nothing
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as --no-build-isolation
    }
    script = "\n".join(COMMANDS.findall(text))
    assert script, "a tutorial without commands"
    command = ["bash", "-euxo", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial_on_methods_has_the_plugin_of_the_tests():
    shown = dict(FILE.findall((DOCS / "tutorials" / "method.md").read_text(encoding="utf-8")))
    files = {Path(name).name: content for name, content in shown.items()}
    assert files == {path.name: path.read_text(encoding="utf-8") for path in PLUGIN.glob("*.*")}
    assert sum(text.count("\n") for text in files.values()) < 65
