"""Test the page of building blocks: all modules, and documented arguments."""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import fczoo

DOCS = Path(__file__).parents[2] / "docs"
MODULES = [
    f"{package}.{entry.name}"
    for package in ("fczoo.functional", "fczoo.aggregators", "fczoo.partitioners")
    for entry in pkgutil.iter_modules(importlib.import_module(package).__path__)
]
LIBRARY = (
    fczoo.partition,
    fczoo.merge,
    fczoo.compute_metrics,
    fczoo.wrap_vit,
    fczoo.PluggedViT.forward,
    fczoo.PluggedViT.load_plugs,
    fczoo.LabelPartition.plot,
    fczoo.LabelPartition.save,
)


def missing_arguments(function) -> list[str]:
    """Return the parameters that a docstring does not describe."""
    text = inspect.getdoc(function) or ""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return [name for name in names if f"\n    {name}: " not in text and f"*{name}: " not in text]


def test_page_lists_every_module(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    page = importlib.import_module("blocks").blocks_page()
    assert len(MODULES) > 20
    assert all(f".. automodule:: {module}\n" in page for module in MODULES)
    result = importlib.import_module("blocks").result_page()
    assert "| `server_storage` | `int \\| None` | bytes | None |" in " ".join(result.split())


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_document_arguments(name):
    module = importlib.import_module(name)
    for function in vars(module).values():
        is_own = inspect.isfunction(function) and function.__module__ == name
        if is_own and not function.__name__.startswith("_"):
            assert not missing_arguments(function), function.__name__


@pytest.mark.parametrize("function", LIBRARY, ids=lambda function: function.__qualname__)
def test_library_documents_arguments_and_errors(function):
    assert not missing_arguments(function)
    assert "Raises:" in function.__doc__
