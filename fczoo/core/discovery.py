"""Find registrations by reading the modules' source, so that names are listed without importing torch."""

import ast
import importlib.util
import logging
import operator
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import Declared

log = logging.getLogger("fczoo")

PLUGINS = "fczoo.plugins"  # entry point group: each entry names a module that registers things on import

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Found(NamedTuple):
    """One registration: ``@register_KIND("NAME")`` above a class or function of a module."""

    name: str
    module: str
    about: str  # its line in ``fczoo list``: the attribute ``about``, else the first line of its docstring
    defined: str  # the class's or function's own name


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
        except Exception:  # of the package around it, which ``load_plugins`` reports
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
                    yield Found(name, module, _about(node), node.name)


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


def declared_options(module: str, name: str) -> dict[str, Declared]:
    """The options that a class and its bases declare, by field, in the order of the dataclass; none where
    ``module`` neither defines nor imports ``name``.

    Raises ValueError where one is declared by other than literals, so that only an import tells it.
    """
    for node in _body(module):
        match node:
            case ast.ClassDef(name=found) if found == name:
                bases = [base.id for base in reversed(node.bases) if isinstance(base, ast.Name)]
                inherited = {k: v for base in bases for k, v in declared_options(module, base).items()}
                return inherited | dict(_own_options(node))
            case ast.ImportFrom(module=str(origin), level=0, names=names):
                for known in names:
                    if name == (known.asname or known.name):
                        return declared_options(origin, known.name)
    return {}


def _own_options(node: ast.ClassDef) -> Iterator[tuple[str, Declared]]:
    for statement in node.body:
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=field),
                value=ast.Call(
                    func=ast.Name(id="option") | ast.Attribute(attr="option"), args=given, keywords=more
                ),
            ):
                said = dict(zip(Declared._fields, given, strict=False)) | {k.arg: k.value for k in more}
                told = [said.get(name, ast.Constant("")) for name in Declared._fields]
                yield field, Declared(*map(_value, told))


def _value(node: ast.expr) -> Any:
    """The value of a literal, or of arithmetic on literals such as ``1 / 3``.

    Raises ValueError for anything else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    return ast.literal_eval(node)


@cache
def _body(module: str) -> list[ast.stmt]:
    """The statements of a module; none where it has no source."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body


_errors: dict[str, str] = {}  # module of a plug-in -> why it cannot be imported; empty where it was


def load_plugins() -> dict[str, str]:
    """Import every installed plug-in once; leave out one that fails, with a warning that names it.

    Returns why a plug-in's module cannot be imported, for those that cannot.
    """
    for entry in entry_points(group=PLUGINS):
        if entry.module not in _errors:
            _errors[entry.module] = ""
            try:
                entry.load()
            except Exception as error:
                reason = _errors[entry.module] = f"{type(error).__name__}: {first_line(error)}"
                place = f"plug-in {entry.name} ({entry.value})"
                log.warning("%s is left out: %s; fix or uninstall it", place, reason)
    return {module: reason for module, reason in _errors.items() if reason}


def import_error(module: str) -> str:
    """Return why a plug-in's module cannot be imported; empty for any other module."""
    return _errors.get(module, "")
