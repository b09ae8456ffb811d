"""Names for methods, data sets, partitioners, aggregators, attacks and protocols. A file in the right folder registers itself."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from .errors import FczooError
from .options import build, nearest

PLUGINS = "fczoo.plugins"  # entry point group: each entry names a module that registers things on import


class Registry:
    """Name -> class or function of one kind, filled by decorators in modules that are imported on demand."""

    def __init__(self, kind: str, *packages: str):
        self.kind, self.packages = kind, packages
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator. Raises FczooError when another object already has the name."""

        def add(entry: Any) -> Any:
            known = self._entries.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (entry.__module__, entry.__qualname__):
                raise FczooError(f"{self.kind} {name!r} is defined twice, in {known.__module__} and in {entry.__module__}; rename one")
            self._entries[name] = entry
            entry.name = name
            return entry

        return add

    def get(self, name: str) -> Any:
        """The entry called ``name``. Raises FczooError with the nearest names when there is none."""
        if name not in self._entries:
            self._load_all()
        if name not in self._entries:
            raise FczooError(f"no {self.kind} is called {name!r}; {nearest(name, list(self._entries))}")
        return self._entries[name]

    def names(self, package: str | None = None) -> list[str]:
        """All names; with ``package``, those defined there."""
        self._load_all()
        return sorted(n for n, e in self._entries.items() if package is None or e.__module__.startswith(package))

    def create(self, spec: str, **options: Any) -> Any:
        """Instance of a registered dataclass from ``NAME``, ``NAME:VALUE`` (its first field) or ``NAME:FIELD=VALUE,...``."""
        name, _, rest = spec.partition(":")
        cls = self.get(name)
        words, fields = {}, [f.name for f in dataclasses.fields(cls)]
        for i, part in enumerate(p for p in rest.split(",") if p):
            key, sign, value = part.partition("=")
            if sign:
                words[key.strip()] = value
            elif i == 0 and fields:
                words[fields[0]] = key
            else:
                raise FczooError(f"cannot read {part!r} in {self.kind} {spec!r}; write NAME:VALUE or NAME:FIELD=VALUE,...")
        return build(cls, name, {**words, **options})

    def _load_all(self) -> None:
        for package in self.packages:
            module = importlib.import_module(package)
            for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
                importlib.import_module(f"{package}.{info.name}")
        load_plugins()


_loaded: set[str] = set()


def load_plugins() -> None:
    """Import every installed plug-in once. Raises FczooError naming the one that fails."""
    for entry in entry_points(group=PLUGINS):
        if entry.value not in _loaded:
            _loaded.add(entry.value)
            try:
                entry.load()
            except Exception as error:
                raise FczooError(f"plug-in {entry.name} ({entry.value}) cannot be imported: {error!r}; mend or uninstall it") from error


METHODS = Registry("method", "fczoo.methods", "fczoo.baselines")
DATASETS = Registry("data set", "fczoo.datasets")
PARTITIONERS = Registry("partitioner", "fczoo.partitioners")
AGGREGATORS = Registry("aggregator", "fczoo.aggregate", "fczoo.robust")
ATTACKS = Registry("attack", "fczoo.attacks")
PROTOCOLS = Registry("protocol", "fczoo.protocols")

register_method = METHODS.register
register_dataset = DATASETS.register
register_partitioner = PARTITIONERS.register
register_aggregator = AGGREGATORS.register
register_attack = ATTACKS.register
register_protocol = PROTOCOLS.register
