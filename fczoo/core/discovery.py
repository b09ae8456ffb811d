"""Find registrations in the modules' source, so that names are listed without importing torch."""

import ast
import importlib.util
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import OptionDeclaration

log = logging.getLogger("fczoo")

# entry point group: each entry names a module that registers things on import
PLUGINS = "fczoo.plugins"

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Registration(NamedTuple):
    """One registration: ``@register_KIND("NAME")`` above a class or function of a module."""

    name: str
    module: str
    # its line in ``fczoo list``: the attribute ``about``, else the first line of its docstring
    about: str
    symbol: str  # the class's or function's own name


def package_registrations(package: str, decorator: str) -> Iterator[Registration]:
    """Yield the registrations in the modules of a package, file by file.

    Args:
        package: Name of the package, such as ``fczoo.methods``.
        decorator: Name of the decorator, such as ``register_method``.

    Raises:
        FczooError: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise FczooError(
            f"{package} is not installed; run `pip install -e .` in the checkout of fczoo"
        )
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.py")):
            if file.name != "__init__.py":
                yield from file_registrations(file, f"{package}.{file.stem}", decorator)


def plugin_entries() -> tuple[EntryPoint, ...]:
    """Return the entry points of installed plug-ins, scanned once per process and search path."""
    return _entries_in(tuple(sys.path))


@cache
def _entries_in(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=PLUGINS))


def plugin_registrations(decorator: str) -> Iterator[Registration]:
    """Yield the registrations in the modules that installed plug-ins name.

    Args:
        decorator: Name of the decorator, such as ``register_method``.
    """
    for entry in plugin_entries():
        try:
            spec = importlib.util.find_spec(entry.module)
        except Exception:  # of the package around it, which ``load_plugins`` reports
            continue
        if spec and spec.origin and spec.origin.endswith(".py"):
            yield from file_registrations(Path(spec.origin), entry.module, decorator)


def file_registrations(file: Path, module: str, decorator: str) -> Iterator[Registration]:
    """Yield the registrations in one file.

    A file with invalid Python yields nothing; importing it reports the error.

    Args:
        file: Source file.
        module: Name of the module for the results.
        decorator: Name of the decorator.
    """
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
                name = _registered_name(call, decorator)
                if name is not None:
                    yield Registration(name, module, _about(node), node.name)


def _registered_name(call: ast.expr, decorator: str) -> str | None:
    """Return NAME of ``@decorator("NAME")``; None for any other decorator."""
    match call:
        case ast.Call(func=ast.Name(id=found), args=[ast.Constant(value=str(name))]) if (
            found == decorator
        ):
            return name
    return None


def _about(node: ast.ClassDef | ast.FunctionDef) -> str:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="about")], value=ast.Constant(value=str(about))):
                return about
    return first_paragraph(ast.get_docstring(node) or "")


def declared_options(module: str, name: str) -> dict[str, OptionDeclaration]:
    """Return the options of a class and its bases by field.

    They are in the order of the dataclass. The result is empty if ``module`` neither defines nor
    imports ``name``.

    Args:
        module: Name of the module, which is read and not imported.
        name: Name of the class.

    Raises:
        ValueError: The declaration of an option is not made of literals, so only an import shows
            its value.
    """
    for node in _body(module):
        match node:
            case ast.ClassDef(name=found) if found == name:
                bases = [base.id for base in reversed(node.bases) if isinstance(base, ast.Name)]
                base_options = {
                    k: v for base in bases for k, v in declared_options(module, base).items()
                }
                return base_options | dict(_own_options(node))
            case ast.ImportFrom(module=str(origin), level=0, names=names):
                for alias in names:
                    if name == (alias.asname or alias.name):
                        return declared_options(origin, alias.name)
    return {}


def _own_options(node: ast.ClassDef) -> Iterator[tuple[str, OptionDeclaration]]:
    for statement in node.body:
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=field),
                value=ast.Call(
                    func=ast.Name(id="option") | ast.Attribute(attr="option"),
                    args=given,
                    keywords=more,
                ),
            ):
                arguments = dict(zip(OptionDeclaration._fields, given, strict=False)) | {
                    k.arg: k.value for k in more
                }
                values = [
                    arguments.get(name, ast.Constant("")) for name in OptionDeclaration._fields
                ]
                yield field, OptionDeclaration(*map(_value, values))


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic on literals such as ``1 / 3``.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    return ast.literal_eval(node)


@cache
def _body(module: str) -> list[ast.stmt]:
    """Return the statements of a module; none without source."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body


_errors: dict[str, str] = {}  # module of a plug-in -> why it cannot be imported; empty where it was


def load_plugins() -> dict[str, str]:
    """Import every installed plug-in once.

    A plug-in that fails is left out, with a warning that names it.

    Returns:
        Module -> the reason, for the plug-ins that cannot be imported.
    """
    for entry in plugin_entries():
        if entry.module not in _errors:
            _errors[entry.module] = ""
            try:
                entry.load()
            except Exception as error:
                reason = _errors[entry.module] = f"{type(error).__name__}: {first_line(error)}"
                plugin = f"plug-in {entry.name} ({entry.value})"
                log.warning("%s is left out: %s; fix or uninstall it", plugin, reason)
    return {module: reason for module, reason in _errors.items() if reason}


def import_error(module: str) -> str:
    """Return why a plug-in's module cannot be imported.

    Args:
        module: Name of a module.

    Returns:
        The reason; empty for any other module.
    """
    return _errors.get(module, "")


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a docstring in one line.

    Args:
        text: Docstring; may be empty.
    """
    return " ".join(text.strip().split("\n\n")[0].split())
