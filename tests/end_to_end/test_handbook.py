"""The handbook: it builds without a warning, and has a page for each method."""

import subprocess
import sys
from pathlib import Path

import pytest

from fczoo.core.registry import METHODS

DOCS = Path(__file__).parents[2] / "docs"


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
