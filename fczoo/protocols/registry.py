"""Registries of protocols and releases: TOML files of fczoo and of plug-ins, by name.

A file ``protocols/NAME.toml`` or ``releases/NAME.toml`` in the folder of a plug-in's package is
found without an import of the plug-in. ``use_protocol_options`` gives a method the values that a
protocol states for it.
"""

import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fczoo.core.discovery import Registration, first_paragraph, plugin_entries
from fczoo.core.errors import FczooError
from fczoo.core.options import OptionDeclaration
from fczoo.core.registry import DATASETS, SPECS, Registry
from fczoo.protocols.reader import read_source
from fczoo.protocols.stated_values import Kind, Source, Statement

if TYPE_CHECKING:
    from fczoo.core.method import Method


log = logging.getLogger("fczoo")

SUFFIX = ".toml"


class SourceRegistry(Registry[Source]):
    """Name -> protocol or release, each read from its file when it is used."""

    def __init__(self, kind: Kind):
        """Create the registry of one kind."""
        super().__init__(kind, f"{kind}s", f"fczoo.assets.{kind}s")
        self._kind = kind
        self._paths: dict[str, Traversable] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Raise FczooError: protocols and releases are TOML files, not classes.

        Args:
            name: Name of the entry.

        Raises:
            FczooError: Always; the message says where the file belongs.
        """
        raise FczooError(
            f"{self._kind} {name!r} must be a TOML file, not a class; write "
            f"{self.decorator}/{name}{SUFFIX} in the plug-in's package (see docs/runs.md)"
        )

    def get(self, name: str) -> Source:
        """Return a protocol or release.

        Args:
            name: Name in any spelling.

        Raises:
            FczooError: The name is unknown (the message has the nearest ones), or its file is not
                valid.
        """
        name = self.canonical_name(name)
        if name not in self._entries:
            self._entries[name] = self._read(name, self._paths[name])
        return self._entries[name]

    def about(self, name: str) -> str:
        """Return one line about a protocol or release."""
        return first_paragraph(self.get(name).about)

    def options(self, name: str) -> dict[str, OptionDeclaration]:
        """Return an empty mapping: protocols and releases have no options."""
        return {}

    @cached_property
    def _registrations(self) -> dict[str, Registration]:
        """Return the files of fczoo, and those of plug-ins that can be read."""
        records: dict[str, Registration] = {}
        for path in (files("fczoo.assets") / self.decorator).iterdir():
            if path.name.endswith(SUFFIX):
                self._find(path, self.packages[0], records)
        for entry in plugin_entries():
            for path in _plugin_files(entry.module, self.decorator):
                try:
                    self._read(path.name.removesuffix(SUFFIX), path)
                except FczooError as error:
                    log.warning("plug-in %s: %s; the file is left out", entry.name, error)
                else:
                    self._find(path, entry.module, records)
        return records

    @property
    def _has_dynamic_plugins(self) -> bool:
        return False

    def _find(self, path: Traversable, place: str, records: dict[str, Registration]) -> None:
        name = path.name.removesuffix(SUFFIX)
        if name in records and records[name].module != place:
            raise self._duplicate_error(name, records[name].module, place)
        records[name] = Registration(name, place, "", "")
        self._check_spelling(name, place, {key: value.module for key, value in records.items()})
        self._paths[name] = path

    def _read(self, name: str, path: Traversable) -> Source:
        return read_source(path, self._kind, name, PROTOCOLS.get)


def _plugin_files(module: str, folder: str) -> list[Path]:
    """Return the TOML files in a folder of a plug-in's package; a single module has none."""
    spec = importlib.util.find_spec(module.partition(".")[0])  # imports nothing
    packages = (spec and spec.submodule_search_locations) or ()
    return sorted(path for root in packages for path in Path(root, folder).glob(f"*{SUFFIX}"))


PROTOCOLS = SourceRegistry("protocol")
RELEASES = SourceRegistry("release")

register_protocol = PROTOCOLS.register

REGISTRY_OF_SETTING: dict[str, Registry[Any]] = {
    "dataset": DATASETS,
    "protocol": PROTOCOLS,
    "as_released": RELEASES,
    **SPECS,
}
"""Settings that name a registered object, with or without its options, and its registry."""


def spell_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name an object, in the spelling of its registry."""
    specs = {name: settings[name] for name in REGISTRY_OF_SETTING if settings[name]}
    return {name: REGISTRY_OF_SETTING[name].canonical(spec) for name, spec in specs.items()}


def sources(protocol: str | None, release: str | None) -> dict[str, Source]:
    """Return the sources of default settings by name; later ones take precedence.

    Args:
        protocol: Name of a protocol; None or ``none`` for none.
        release: Name of a release; None or ``none`` for none.

    Raises:
        FczooError: A name is unknown.
    """
    choices = {"protocol": (PROTOCOLS, protocol), "as released:": (RELEASES, release)}
    return {
        f"{label} {registry.canonical_name(name)}": registry.get(name)
        for label, (registry, name) in choices.items()
        if name and name.lower() != "none"
    }


MethodClass = TypeVar("MethodClass", bound="type[Method]")


def use_protocol_options(
    protocol: str, method: str, *, datasets: Collection[str] = (), column: int = 0
) -> Callable[[MethodClass], MethodClass]:
    """Decorate a method's dataclass: add a protocol's values to its ``dataset_options``.

    These are the values that a protocol states for single data sets, as in a table of the paper's
    appendix. Values that equal the method's defaults are left out. The class's own
    ``dataset_options`` stay for data sets without such values.

    Args:
        protocol: Name of the protocol.
        method: Row of the method in the protocol.
        datasets: Data sets; empty: all of the protocol.
        column: Position of the split whose value is used if the paper has one value per split.
    """

    def add(cls: MethodClass) -> MethodClass:
        defaults = {field.name: field.default for field in fields(cast(Any, cls))}
        options: dict[str, Any] = dict(vars(cls).get("dataset_options", {}))
        for dataset, methods in PROTOCOLS.get(protocol).dataset_options.items():
            values = {
                name: _value(statement, column)
                for name, statement in methods.get(method, {}).items()
            }
            changes = {k: v for k, v in values.items() if k in defaults and v != defaults[k]}
            if changes and (not datasets or dataset in datasets):
                options[dataset] = changes
        cls.dataset_options = options
        return cls

    return add


def _value(statement: Statement, column: int) -> Any:
    columns = statement.columns
    return columns[column] if len(columns) > 1 else columns[0]
