"""Command ``fczoo new``: write a plug-in package from a template."""

import keyword
import re
from importlib.resources import files
from pathlib import Path

import click

from fczoo.backbones.names import BACKBONES, spellings
from fczoo.cli.options import GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.metrics import BASE_METRICS, METRICS, MORE_METRICS, USER_METRICS
from fczoo.core.names import match
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    AUGMENTATIONS,
    DATASETS,
    METHODS,
    PARTITIONERS,
)

KINDS = {
    "method": METHODS,
    "dataset": DATASETS,
    "partitioner": PARTITIONERS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "backbone": BACKBONES,
    "augmentation": AUGMENTATIONS,
    "metric": USER_METRICS,
}

RESERVED_NAMES = ("all", "auto", "backbone", "file", "result", "settings")
"""Words with a special meaning as values of options, such as ``--methods all``."""


@click.command(cls=GroupedCommand)
@click.argument("kind", type=Name(list(KINDS)))
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to write, which must not exist.  [default: fczoo-NAME]",
)
def new(kind: str, name: str, out: Path | None) -> None:
    """Write a plug-in package: a new part called NAME, its test and its pyproject.toml."""
    folder = write_plugin(kind, name, out)
    click.echo(f"Written to {folder}. Next: pip install -e {folder} && pytest {folder}")


def write_plugin(kind: str, name: str, out: Path | None = None) -> Path:
    """Write a plug-in package and return its folder.

    Args:
        kind: A key of ``KINDS``.
        name: Name of the part: lower-case letters, digits and single ``_`` between them.
        out: Folder to write. None: ``fczoo-NAME``.

    Returns:
        The folder.

    Raises:
        FczooError: The name is invalid or taken, or the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise FczooError(
            f"{name!r} is not a valid name of {_article(kind)}; use lower-case letters, digits and "
            "single _ between them"
        )
    if name in RESERVED_NAMES:
        raise FczooError(
            f"{name!r} is not a valid name of {_article(kind)}: fczoo reserves this word; choose "
            "another name"
        )
    if existing_name := _existing_name(kind, name):
        problem = f"there is {_article(kind)} called {existing_name} already"
        raise FczooError(f"{problem}; choose another name")
    distribution = f"fczoo-{name.replace('_', '-')}"
    folder = out or Path(distribution)
    if folder.exists():
        raise FczooError(f"{folder} exists already; remove it or choose another folder with --out")
    words = {
        "name": name,
        "module": f"fczoo_{name}",
        "distribution": distribution,
        "title": name.replace("_", " ").capitalize(),
        "class_name": _class_name(kind, name),
    }
    templates = {
        f"fczoo_{name}.py": f"{kind}.py",
        f"test_{name}.py": f"test_{kind}.py",
        "pyproject.toml": "pyproject.toml",
    }
    texts = {file: _render(template, words) for file, template in templates.items()}
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _existing_name(kind: str, name: str) -> str | None:
    """Return the registered or built-in name that equals a new one; None if there is none."""
    built_in: tuple[str, ...] = ()
    if kind == "backbone":
        built_in = spellings()
    elif kind == "metric":
        built_in = (*METRICS, *MORE_METRICS, *BASE_METRICS)
    return KINDS[kind].find(name) or match(name, built_in)


def _class_name(kind: str, name: str) -> str:
    """Convert the name to a class name.

    Raises FczooError if it is a keyword or the template uses it already.
    """
    class_name = "".join(part.capitalize() for part in name.split("_"))
    if keyword.iskeyword(class_name) or re.search(rf"\b{class_name}\b", _template(f"{kind}.py")):
        raise FczooError(
            f"{name!r} is not a valid name of {_article(kind)}: Python or the template uses "
            f"{class_name}; choose another name"
        )
    return class_name


def _template(name: str) -> str:
    return (files("fczoo.assets") / "new" / f"{name}.jinja").read_text(encoding="utf-8")


def _render(template: str, words: dict[str, str]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_template(template)).render(words)
