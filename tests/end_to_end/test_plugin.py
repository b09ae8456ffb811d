"""Test a method from another package: it is installed, listed and run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers_warm import warm_python

HERE = Path(__file__).parent


@pytest.mark.slow
def test_third_party_method_is_installed_checked_listed_and_run(tmp_path):
    source = shutil.copytree(HERE / "plugin", tmp_path / "source")  # pip builds inside of it
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
        str(source),
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def python(*arguments: str) -> str:
        return subprocess.run(
            [warm_python(), "-m", *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=300,
        ).stdout

    def fczoo(*arguments: str) -> str:
        return python("fczoo", *arguments)

    shutil.copy(HERE / "plugin" / "test_fedprox.py", tmp_path)
    assert "1 passed" in python("pytest", "-p", "no:cacheprovider", "test_fedprox.py")
    assert "fedprox" in fczoo("list", "methods")
    assert "mu, weight of" in fczoo("show", "fedprox")
    small = [
        "--train-per-class",
        "20",
        "--test-per-class",
        "10",
        "--tasks",
        "2",
        "--epochs",
        "10",
        "--partition",
        "iid",
        "--out",
        "run",
    ]
    row = next(
        line
        for line in fczoo("bench", "--methods", "fedprox", *small).splitlines()
        if line.startswith("fedprox")
    )
    assert float(row.split()[1]) > 20  # chance is 10
