"""Pages of the building blocks and of the fields of a result, written as the handbook is built."""

import importlib
from collections.abc import Iterable, Sequence
from pkgutil import iter_modules
from typing import Any

from tabulate import tabulate

from fczoo.reports.result_fields import FieldDescription, describe_result_fields

PACKAGES = {
    "fczoo.functional": "Parts of methods: losses, heads, statistics, exemplars, LoRA, prompts.",
    "fczoo.aggregators": "Merges of uploads; `fczoo.merge` calls them by name.",
    "fczoo.partitioners": "Partitions over clients; `fczoo.partition` calls them by name.",
}
MODULES = {
    "fczoo.core.backbone": "The plugs of a backbone: names and shapes of what may be trained.",
    "fczoo.core.vit_config": "The configuration of a backbone.",
    "fczoo.core.tree": "Trees: dictionaries, name -> tensor.",
    "fczoo.core.metrics": "Formulas of metrics; `fczoo.compute_metrics` calls them all.",
}
ABOUT = """Every function and class, with shapes of its tensors. Examples are in
[Use as a library](../library.md). B is the number of images of a batch, C that of classes, c that
of the current task's classes, D the length of a feature, L that of a prompt, K that of clients."""


def blocks_page() -> str:
    """Return the page of all public functions and classes of the building blocks."""
    parts = ["# Building blocks", ABOUT]
    for package, about in PACKAGES.items():
        parts += [f"## {package}", about]
        folder = importlib.import_module(package).__path__
        parts += [_module(f"{package}.{entry.name}") for entry in iter_modules(folder)]
    parts += ["## fczoo.core", *(f"{about}\n\n{_module(name)}" for name, about in MODULES.items())]
    protocol = ".. autoclass:: fczoo.core.types.ServerAggregator\n   :special-members: __call__"
    return "\n\n".join([*parts, "### fczoo.core.types", rst(protocol)])


def _module(name: str) -> str:
    return f"### {name}\n\n{rst(f'.. automodule:: {name}')}"


def rst(text: str) -> str:
    """Return reStructuredText as part of a Markdown page.

    Args:
        text: Directives.
    """
    return f"~~~~{{eval-rst}}\n{text}\n~~~~"


def pipe_table(rows: Iterable[Sequence[Any]], head: Sequence[str]) -> str:
    """Return a Markdown table.

    Args:
        rows: Cells, row by row.
        head: Names of the columns.
    """
    cells = [[str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return tabulate(cells, head, tablefmt="pipe", disable_numparse=True)


def result_page() -> str:
    """Return the page of the fields of a result."""
    rows = [
        [f"`{entry.name}`", f"`{entry.type}`", entry.unit, entry.default, entry.meaning]
        for entry in describe_result_fields()
    ]
    table = pipe_table(rows, FieldDescription._fields)
    about = "Fields of `fczoo.Result` and of `result.json`, as `fczoo show result` prints them."
    return f"# Result\n\n{about}\n\n{table}"
