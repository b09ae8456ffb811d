"""``fczoo new``: a plug-in package to begin with."""

import keyword
import re
from importlib.resources import files
from pathlib import Path

import click

from fczoo.cli.options import GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.registry import AGGREGATORS, ATTACKS, DATASETS, METHODS, PARTITIONERS

KINDS = {
    "method": METHODS,
    "dataset": DATASETS,
    "partitioner": PARTITIONERS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
}


@click.command(cls=GroupedCommand)
@click.argument("kind", type=Name(list(KINDS)))
@click.argument("name")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder to write, which must not exist.  [fczoo-NAME]"
)
def new(kind: str, name: str, out: Path | None) -> None:
    """Write a plug-in package: a part of your own called NAME, its test and its pyproject.toml."""
    folder = write_plugin(kind, name, out)
    click.echo(f"Written to {folder}. Next: pip install -e {folder} && pytest {folder}")


def write_plugin(kind: str, name: str, out: Path | None = None) -> Path:
    """Write the package and return its folder, ``fczoo-NAME`` unless told otherwise.

    Raises FczooError for a name that cannot be one or is taken, and for a folder that exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise FczooError(
            f"{name!r} cannot name a {kind}; take lower-case letters, digits and single _ between them"
        )
    if taken := KINDS[kind].find(name):
        raise FczooError(f"there is a {kind} called {taken} already; choose another name")
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
    written = {
        f"fczoo_{name}.py": f"{kind}.py",
        f"test_{name}.py": f"test_{kind}.py",
        "pyproject.toml": "pyproject.toml",
    }
    texts = {file: _rendered(template, words) for file, template in written.items()}
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def _class_name(kind: str, name: str) -> str:
    """The name as a class has it. Raises FczooError where the template uses that word already."""
    word = "".join(part.capitalize() for part in name.split("_"))
    if keyword.iskeyword(word) or re.search(rf"\b{word}\b", _template(f"{kind}.py")):
        raise FczooError(f"{name!r} cannot name a {kind}: {word} means something else; choose another name")
    return word


def _template(name: str) -> str:
    return (files("fczoo.assets") / "new" / f"{name}.jinja").read_text(encoding="utf-8")


def _rendered(template: str, words: dict[str, str]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_template(template)).render(words)
