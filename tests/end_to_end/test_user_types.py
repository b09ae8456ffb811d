"""Test the handbook's Python code with mypy against the types of fczoo."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy (extra test) is not installed")
DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"```\{code-block\} python\n:caption: (\S+)\n\n(.*?)```", flags=re.DOTALL)
SNIPPET = re.compile(r"^```python\n(.*?)```", flags=re.DOTALL | re.MULTILINE)
WRONG_CODE = """import fczoo

result = fczoo.run(fczoo.create_method("fedncm"), dataset="digits", rounds=1)
fczoo.bench("fedncm", ["zero"])
result.accurcy
results = fczoo.bench("fedncm")
results.plot().savfig("curves.png")
fczoo.partition([0, 1], "iid", 2).plot().savfig("split.png")
fczoo.partition([0, 1], "iid", 2).indices[0].shpe
fczoo.compute_metrics([[90.0]])["A_N"].shape
fczoo.PluggedViT(fczoo.load_backbone("vit_nano_32"), {}).load_plug({})
count: int = results.to_pandas()
"""


def has_pandas_stubs() -> bool:
    """Return whether mypy knows pandas; its package brings no types."""
    try:
        return bool(version("pandas-stubs"))
    except PackageNotFoundError:
        return False


def mypy_errors(folder: Path, *options: str) -> list[str]:
    """Return the errors of mypy in the files of a folder.

    Args:
        folder: The folder.
        options: Further options of mypy.
    """
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        *options,
    ]
    command += ["--check-untyped-defs", "--cache-dir", str(folder.parent / "cache"), str(folder)]
    environment = {
        **os.environ,
        "MYPYPATH": str(DOCS.parent),
    }  # an editable installation is not seen by mypy
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment
    )
    assert process.returncode in (0, 1), process.stderr
    return [line for line in process.stdout.splitlines() if ": error: " in line]


@pytest.mark.slow
def test_mypy_accepts_handbook_code_and_reports_errors(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    wrong.mkdir()
    for page in [*DOCS.glob("tutorials/*.md"), *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name, code in FILE.findall(text):
            (right / Path(name).name).write_text(code)
        for number, code in enumerate(SNIPPET.findall(text)):
            (right / f"{page.stem}_{number}.py").write_text(code)
    assert len(list(right.iterdir())) >= 4
    assert mypy_errors(right) == []
    (wrong / "mistaken.py").write_text(WRONG_CODE)
    errors = mypy_errors(wrong)
    lines = [4, 5, 7, 8, 9, 10, 11, *([12] if has_pandas_stubs() else [])]
    assert [int(line.split(":")[1]) for line in errors] == lines, errors
