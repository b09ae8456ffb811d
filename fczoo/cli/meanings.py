"""Find what a name means for ``fczoo show NAME``.

It may be a protocol, release, backbone, setting or option.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import NamedTuple

from fczoo.backbones.names import BUNDLED_NAME, canonical_backbone, names_with, spellings
from fczoo.cli.listing import KINDS, PARTS, SOURCES
from fczoo.cli.pointers import first_few, option_owners, option_pointer
from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import flag, nearest, plural
from fczoo.core.registry import METHODS
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import REGISTRY_OF_SETTING
from fczoo.protocols.source import Source
from fczoo.reports.text_format import option_word, plain_table


class Meaning(NamedTuple):
    """One meaning of a name."""

    line: str  # description, and the command that shows it
    page: Callable[[], str]


def show_any(word: str, dataset: str | None) -> str:
    """Return the page of a name; if it has several meanings, a list of them with their commands.

    Args:
        word: Name in any spelling.
        dataset: Data set whose values are shown. None: digits; for a protocol or release, all.

    Returns:
        The text to print.

    Raises:
        FczooError: The name has no meaning.
    """
    if word.lower() == "settings" or any(registry.find(word) for registry in PARTS):
        from fczoo.cli.show import show  # imports torch

        return show(word, dataset or "digits")
    matches = meanings(word.lstrip("-"), dataset)
    if len(matches) == 1:
        return matches[0].page()
    if matches:
        lines = "\n".join(f"- {meaning.line}" for meaning in matches)
        return f"{word} has {len(matches)} meanings:\n{lines}"
    if advice := _advice(word):
        raise FczooError(f"nothing is called {word!r}; {advice}")
    names = {name for registry in (*PARTS, *SOURCES.values()) for name in registry.names()}
    options = {name for method in METHODS.names() for name in METHODS.options(method)}
    settings = {field.name for field in fields(Settings)}
    known_names = {"settings", BUNDLED_NAME} | names | options | settings
    is_known_part = any(fold(word) in fold(name) for name in known_names)
    if not is_known_part and (backbones := names_with(word)):
        raise FczooError(
            f"nothing is called {word!r} alone; backbones have it in their names: fczoo show "
            f"backbone {backbones[0]}, or {', '.join(backbones[1:]) or 'fczoo list backbones'}"
        )
    raise FczooError(f"nothing is called {word!r}; {nearest(word, known_names)}")


def meanings(word: str, dataset: str | None) -> list[Meaning]:
    """Return the meanings of a name, except parts that ``fczoo show NAME`` has a page for.

    Args:
        word: Name in any spelling.
        dataset: Data set whose values a protocol or release shows. None: all.

    Returns:
        Meanings with their pages.
    """
    matches = []
    for kind, registry in SOURCES.items():
        if name := registry.find(word):
            source, line = registry.get(name), f"the {kind} {name}: fczoo show {kind} {name}"
            matches.append(Meaning(line, partial(_source_page, source, dataset)))
    backbone = canonical_backbone(word)
    if backbone in spellings():
        line = f"the backbone {backbone}: fczoo show backbone {backbone}"
        matches.append(Meaning(line, lambda: _backbone_page(backbone)))
    if setting := match(word, [field.name for field in fields(Settings)]):
        line = f"the setting {setting} of a run: fczoo bench {flag(setting)}"
        matches.append(Meaning(line, lambda: _setting_page(setting)))
    if owners := option_owners(word):
        owner_names, (method, option) = first_few(list(owners)), next(iter(owners.items()))
        method = method if len(owners) == 1 else "METHOD"
        line = (
            f"an option of {owner_names}: fczoo show {method} has its value, --set "
            f"{method}.{option}=VALUE sets it"
        )
        matches.append(Meaning(line, lambda: _option_page(owners)))
    return matches


def _advice(word: str) -> str:
    """Return what to type for a kind of names, an option of bench, or an option of another tool."""
    from fczoo.cli.bench import bench

    options = {param.name or "": param for param in bench.params}
    if kind := match(word, KINDS):
        return f"see fczoo list {kind}"
    if option := match(word.lstrip("-"), options):
        return f"{options[option].opts[0]} is an option: see fczoo bench --help"
    return option_pointer(word, options)


def _source_page(source: Source, dataset: str | None) -> str:
    from fczoo.cli.show_protocol import source_page

    return source_page(source, dataset)


def _backbone_page(name: str) -> str:
    from fczoo.cli.show_backbone import backbone_page  # imports torch

    return backbone_page(name)


def _setting_page(name: str) -> str:
    field = next(field for field in fields(Settings) if field.name == name)
    rows = [
        ("setting", name),
        ("option", f"fczoo bench {flag(name)}"),
        ("what it is", field.metadata["meaning"]),
        ("default", option_word(field.default)),
        ("group", field.metadata["group"]),
    ]
    if registry := REGISTRY_OF_SETTING.get(name):
        rows.append(("names", ", ".join(registry.names())))
    return plain_table(rows)


def _option_page(owners: Mapping[str, str]) -> str:
    """Return the page of an option of methods, from its spelling by method."""
    rows = []
    for owner, option in owners.items():
        declaration = METHODS.options(owner)[option]
        rows.append(
            (f"{owner}.{option}", f"{option_word(declaration.default)}: {declaration.meaning}")
        )
    method = next(iter(owners))
    return (
        f"An option of {plural(len(owners), 'method')}, with its "
        f"default:\n\n{plain_table(rows)}\n\n"
        f"fczoo bench --methods {method} --set {rows[0][0]}=VALUE sets it; "
        f"fczoo show {method} has all options of {method}."
    )
