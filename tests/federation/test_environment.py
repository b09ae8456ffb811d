"""The hash of a run's code: what counts as a change of it, and the commit next to it."""

import ast
import subprocess
from pathlib import Path

import pytest

from fczoo.federation import environment
from fczoo.federation.environment import commit, statements

SOURCE = '''"""Add numbers."""

# a reason
def add(a, b):
    """Return the sum."""
    text = """
# part of a text

"""
    return a + b, text  # both


class Empty:
    "Hold nothing."; size = 0
'''


def lines_that_count(source: str) -> str:
    return statements(source, ast.parse(source))


def test_only_statements_count():
    assert lines_that_count(SOURCE) == "\n".join(
        [
            "def add(a, b):",
            '    text = """',
            "# part of a text",
            "",
            '"""',
            "    return a + b, text  # both",
            "class Empty:",
            '    "Hold nothing."; size = 0',
        ]
    )


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""Add numbers."""', '"""Add two\n\nnumbers."""', True),
        ("# a reason", "# another\n\n# reason", True),
        ('"""Return the sum."""', '"""Return it."""', True),
        ("# part of a text", "# part of this", False),
        ("a + b", "a - b", False),
        ("size = 0", "size = 1", False),
    ],
)
def test_a_change_of_words_is_not_one_of_code(old: str, new: str, same: bool):
    assert old in SOURCE
    assert (lines_that_count(SOURCE.replace(old, new)) == lines_that_count(SOURCE)) is same


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Name the commit of a checkout, with ``+`` after a change, and nothing without a checkout."""
    module = tmp_path / "fczoo/federation/environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("a = 1\n")
    monkeypatch.setattr(environment, "__file__", str(module))
    commit.cache_clear()
    assert commit() == ""
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit.cache_clear()
    head = commit()
    assert len(head) == 40
    module.write_text("a = 2\n")
    commit.cache_clear()
    assert commit() == f"{head}+"
    commit.cache_clear()
