"""The source that a run uses: what its numbers can depend on, and nothing else."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fczoo.core.method import Method
from fczoo.core.registry import ATTACKS, DATASETS, LOCAL_TRAINING, PARTITIONERS, make_aggregator
from fczoo.federation.settings import Settings

ENGINE = "fczoo.federation.benchmark"  # with all that it imports: engine, core, data, security, backbones


def code_of(settings: Settings, method: Method) -> dict[str, str]:
    """SHA-256 of every module that a run uses, by its name: the engine, its method, data set, partitioner,
    aggregator, attack and local training, and what these import of fczoo or of their own package.
    """
    used: list[Any] = [type(method), make_aggregator(settings.aggregator or method.training().averaging)]
    if settings.dataset in DATASETS.names():  # else the images were handed over
        used.append(DATASETS.get(settings.dataset))
    named = (
        (PARTITIONERS, settings.partition),
        (ATTACKS, settings.attack or ""),
        (LOCAL_TRAINING, settings.local or ""),
    )
    for registry, spec in named:
        name = spec.partition(":")[0]
        if name and name != "file":
            used.append(registry.get(name))
    found: dict[str, str] = {}
    for module in (ENGINE, *(entry.__module__ for entry in used)):
        _collect(module, {"fczoo", module.partition(".")[0]}, found)
    return dict(sorted(found.items()))


def digest(code: Mapping[str, str]) -> str:
    """One hash of all of them."""
    return hashlib.sha256("".join(f"{name} {code[name]}\n" for name in sorted(code)).encode()).hexdigest()


def digest_of(*modules: str) -> str:
    """One hash of some modules and of what they import of fczoo."""
    found: dict[str, str] = {}
    for module in modules:
        _collect(module, {"fczoo"}, found)
    return digest(found)


def file_of(module: str) -> Path | None:
    """The file of a module; None where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # no package, or a notebook's own module
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _collect(module: str, packages: set[str], found: dict[str, str]) -> None:
    """Add a module, and all that it imports of some packages."""
    if module not in found and (source := _source(module)):
        found[module] = source[0]
        for name in source[1]:
            if name.partition(".")[0] in packages:
                _collect(name, packages, found)


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]] | None:
    """Hash of a module's file, and what it may import; None where it has no source."""
    file = file_of(module)
    if file is None:
        return None
    content = file.read_bytes()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imported = dict.fromkeys(_imports(ast.parse(content), package))
    return hashlib.sha256(content).hexdigest(), tuple(imported)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names that may be modules: ``from a import b`` may mean ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}"
            base = importlib.util.resolve_name(origin, package) if node.level else origin
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
