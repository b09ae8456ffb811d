"""The hash of a run's code, and the commit of its checkout."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

from fczoo.federation import environment
from fczoo.federation.environment import commit, statements
from helpers_warm import warm_python

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


def hashed_lines(source: str) -> str:
    return statements(source, ast.parse(source))


def test_hash_uses_only_statements():
    assert hashed_lines(SOURCE) == "\n".join(
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
def test_hash_ignores_comments_and_docstrings(old: str, new: str, same: bool):
    assert old in SOURCE
    assert (hashed_lines(SOURCE.replace(old, new)) == hashed_lines(SOURCE)) is same


def test_commit_matches_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


PARSE_ALL = """
import ast, sys
from fczoo.federation import environment

parse, count = ast.parse, []
ast.parse = lambda *arguments: (count.append(1), parse(*arguments))[1]
print(environment.digest_of("fczoo.core.files"), len(count))
"""


def digest_and_parses(home: Path) -> list[str]:
    """Hash one module and its imports in a separate process; return the hash and the parses."""
    process = subprocess.run(
        [warm_python(), "-c", PARSE_ALL],
        env={**os.environ, "FCZOO_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.split()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"a": ["b"]}', b'{"fczoo.core ab": ["c", ["d"'])
def test_modules_are_parsed_only_by_first_process(tmp_path: Path, damage: bytes):
    digest, parses = digest_and_parses(tmp_path)
    assert int(parses) > 1
    assert digest_and_parses(tmp_path) == [digest, "0"]
    (file,) = (tmp_path / "cache").glob("*.json")
    file.write_bytes(damage)
    assert digest_and_parses(tmp_path) == [digest, parses]


def test_unwritable_cache_folder_keeps_hash(tmp_path: Path):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    first, second = digest_and_parses(tmp_path), digest_and_parses(tmp_path)
    assert first == second
    assert int(first[1]) > 1
