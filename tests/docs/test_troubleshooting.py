"""Test that messages of the handbook occur in the source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PLACEHOLDER = "\0"
MESSAGES = re.findall(r"^- `(.+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """Return the text of a string in a program; values become a placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]|%\.\df", PLACEHOLDER, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else PLACEHOLDER for v in node.values]
        return "".join(map(str, parts))
    return ""


@cache
def strings() -> tuple[str, ...]:
    """Return all strings of the package's sources."""
    files = [*(ROOT / "fczoo").rglob("*.py"), *(ROOT / "datasets").glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return tuple(text for text in map(text_of, nodes) if text)


def occurs(message: str, text: str) -> bool:
    """Return whether a message, with ``...`` for anything, is in a text."""
    parts = [re.escape(part) for part in message.split("...")]
    return re.search(".*".join(parts), text, flags=re.DOTALL) is not None


def test_page_has_common_messages() -> None:
    assert len(MESSAGES) > 35
    assert len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize("message", MESSAGES)
def test_message_occurs_in_source(message: str) -> None:
    assert any(occurs(message, text) for text in strings())


@pytest.mark.parametrize("message", ["no method is named '...'", "out of memory; buy more"])
def test_invented_message_is_detected(message: str) -> None:
    assert not any(occurs(message, text) for text in strings())


def test_each_message_has_explanation() -> None:
    """Explain each message; those of missing packages share one explanation."""
    text = PAGE.read_text(encoding="utf-8")
    unexplained = re.findall(r"^- `(.+)`\n(?!\n  \S)", text, flags=re.MULTILINE)
    assert all("pip install" in message for message in unexplained)
