"""The method of the tutorial on client memory."""

import re
from pathlib import Path
from typing import Any

import pytest

from fczoo import Method
from fczoo.core.registry import METHODS

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "memory.md"


@pytest.fixture(scope="session")
def scaffold() -> Method:
    """Return the method of the tutorial, which is not installed here."""
    (code,) = re.findall(
        r"fczoo_scaffold\.py\n\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL
    )
    names: dict[str, Any] = {"__name__": "fczoo_scaffold"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS, "_entries", dict(METHODS._entries))
        exec(compile(code, "fczoo_scaffold.py", "exec", dont_inherit=True), names)
    return names["Scaffold"](lr=0.3)
