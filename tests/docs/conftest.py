"""Modules of the folder docs, which is not a package."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def docs_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a module of the folder docs."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module
