"""Finds registrations by reading the modules' source, so that names are listed without importing torch."""

import ast
import importlib.util
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from fczoo.core.errors import FczooError

PLUGINS = "fczoo.plugins"  # entry point group: each entry names a module that registers things on import


class Found(NamedTuple):
    """One registration: ``@register_KIND("NAME")`` above a class or function of a module."""

    name: str
    module: str
    about: str  # its line in ``fczoo list``: the attribute ``about``, else the first line of its docstring


def in_package(package: str, decorator: str) -> Iterator[Found]:
    """Registrations with ``decorator`` in the modules of a package, in the order of their names.

    Raises FczooError when the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise FczooError(f"{package} is not installed; run `pip install -e .` in the checkout of fczoo")
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.py")):
            if file.name != "__init__.py":
                yield from in_file(file, f"{package}.{file.stem}", decorator)


def in_plugins(decorator: str) -> Iterator[Found]:
    """Registrations written in the very files of the modules that installed plug-ins name."""
    for entry in entry_points(group=PLUGINS):
        try:
            spec = importlib.util.find_spec(entry.module)
        except ImportError:
            continue
        if spec and spec.origin and spec.origin.endswith(".py"):
            yield from in_file(Path(spec.origin), entry.module, decorator)


def in_file(file: Path, module: str, decorator: str) -> Iterator[Found]:
    """Registrations in one file; none in a file that is no valid Python, whose import tells the error."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if f"@{decorator}" not in text:
        return
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for call in node.decorator_list:
                name = _registered(call, decorator)
                if name is not None:
                    yield Found(name, module, _about(node))


def _registered(call: ast.expr, decorator: str) -> str | None:
    """NAME in ``@decorator("NAME")``; None for any other decorator."""
    match call:
        case ast.Call(func=ast.Name(id=found), args=[ast.Constant(value=str(name))]) if found == decorator:
            return name
    return None


def _about(node: ast.ClassDef | ast.FunctionDef) -> str:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="about")], value=ast.Constant(value=str(about))):
                return about
    return (ast.get_docstring(node) or "").split("\n")[0]
