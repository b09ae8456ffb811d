"""Test that the examples of the handbook's library page print the output of the page."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
TEXT = PAGE.read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n", flags=re.MULTILINE)
EXAMPLE = re.compile(r"^```python\n(.*?)```\n\n```text\n(.*?)```", flags=re.DOTALL | re.MULTILINE)
STRATEGY = re.compile(
    r"```\{code-block\} python\n:caption: flower_strategy.py\n\n(.*?)```", re.DOTALL
)
SECTION = re.compile(r"^## (.*)$", flags=re.MULTILINE)


def examples() -> list[Any]:
    """Return code and output of each example, named by its section."""
    entries = []
    for match in EXAMPLE.finditer(TEXT):
        section = SECTION.findall(TEXT[: match.start()])[-1]
        entries.append(pytest.param(match[1], match[2], id=section))
    return entries


def test_every_example_of_page_is_tested():
    assert len(examples()) == len(PYTHON.findall(TEXT)) == 6


@pytest.mark.parametrize(("code", "output"), examples())
def test_example_prints_output_of_page(code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__example__"})
    assert printed.getvalue() == output


def test_aggregator_works_in_flower_strategy(tmp_path):
    """By hand: (10 * 1 + 30 * 3 + 10 * 100) / 50 = 22, (10 * 2 + 30 * 4 - 1000) / 50 = -17.2."""
    pytest.importorskip("flwr", reason="flwr is not installed; it needs a separate environment")
    (tmp_path / "flower_strategy.py").write_text(STRATEGY.findall(TEXT)[0], encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "flower_strategy.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["fedavg [ 22.  -17.2]", "median [3. 2.]"]
