"""Names of methods, data sets, partitioners, aggregators, attacks, local training, protocols and releases.

A file in the right folder registers itself, and so does an installed plug-in (entry point group
``fczoo.plugins``).
"""

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fczoo.core.discovery import (
    PLUGINS,
    Found,
    declared_options,
    import_error,
    in_package,
    in_plugins,
    load_plugins,
)
from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import Declared, build, declared, nearest, quoted, spell, spell_fields

if TYPE_CHECKING:
    from fczoo.core.method import Method
    from fczoo.core.types import ServerAggregator

Entry = TypeVar("Entry")
Decorated = TypeVar("Decorated")


class Registry(Generic[Entry]):
    """Name -> class or function of one kind, filled by decorators in modules that are imported on demand.

    Names are matched without regard to case, ``-`` and ``_``; the registered spelling is stored and shown.
    """

    def __init__(self, kind: str, decorator: str, *packages: str):
        self.kind, self.decorator, self.packages = kind, decorator, packages
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Decorated], Decorated]:
        """Decorator, which leaves the type of what it is put on.

        Raises FczooError when another object already has the name or one that differs from it only in
        case, ``-`` or ``_``, and when a class with options is no dataclass.
        """

        def add(entry: Any) -> Any:
            if any(isinstance(value, dataclasses.Field) for value in vars(entry).values()):
                problem = f"{entry.__qualname__} in {entry.__module__} has options and is no dataclass"
                raise FczooError(f"{problem}; write @dataclass(frozen=True) above the class")
            other: Any = self._entries.get(name)
            if other is not None and _origin(other) != _origin(entry):
                raise self._twice(name, other.__module__, entry.__module__)
            read = self.__dict__.get("_found", {})  # the sources are not read for this check alone
            modules = {found: read[found].module for found in read}
            modules |= {known: other.__module__ for known, other in self._entries.items()}
            self._check_spelling(name, entry.__module__, modules)
            self._entries[name] = entry
            entry.name = name
            return entry

        return add

    def get(self, name: str) -> Entry:
        """Return the entry called ``name``. Raises FczooError with the nearest names if there is none."""
        if not isinstance(name, str):
            raise FczooError(f"{quoted(name)} is not the name of a {self.kind}; give a word")
        name = self.find(name) or name
        found = self._found.get(name)
        if name not in self._entries and found:
            self._load(name)
        if name not in self._entries:
            load_plugins()
        module = found.module if found else getattr(self._entries.get(name), "__module__", "")
        if reason := import_error(module):
            problem = f"{self.kind} {name} is in {module}, which cannot be imported: {reason}"
            raise FczooError(f"{problem}; fix or uninstall that plug-in")
        if name not in self._entries:
            raise self._unknown(name)
        return self._entries[name]

    def find(self, word: str) -> str | None:
        """Return the registered spelling of a name, None for an unknown one."""
        if word in self._found or word in self._entries:
            return word
        if self._unread:
            load_plugins()
        return match(word, [*self._found, *self._entries])

    def canonical_name(self, word: str) -> str:
        """Return the registered spelling of a name. Raises FczooError with the nearest names if unknown."""
        name = self.find(word)
        if name is None:
            raise self._unknown(word)
        return name

    def names(self, package: str | None = None) -> list[str]:
        """All names, or those that ``package`` defines, sorted.

        Imports only the plug-ins whose names cannot be read from their source.
        """
        modules = self._modules()
        return sorted(name for name in modules if not package or modules[name].startswith(package))

    def about(self, name: str) -> str:
        """Return one line about an entry, read from its source where possible, so without an import."""
        name = self.find(name) or name
        if name in self._found:
            return self._found[name].about
        entry = self.get(name)
        return getattr(entry, "about", "") or (entry.__doc__ or "").strip().split("\n")[0]

    def options(self, name: str) -> dict[str, Declared]:
        """Return the options of an entry by field, read from its source where that tells them."""
        name = self.find(name) or name
        if name in self._found:
            with contextlib.suppress(ValueError):
                return declared_options(self._found[name].module, self._found[name].defined)
        entry: Any = self.get(name)
        return declared(entry) if isinstance(entry, type) and dataclasses.is_dataclass(entry) else {}

    def create(self, spec: str, **options: Any) -> Any:
        """Instance of a registered dataclass from ``NAME``, ``NAME:VALUE`` or ``NAME:FIELD=VALUE,...``, or a
        registered function by its name.

        A bare ``VALUE`` belongs to the first field. Raises FczooError for an unknown name or field and for a
        value that does not fit.
        """
        name, _, rest = spec.partition(":")
        cls: Any = self.get(name)
        name = self.find(name) or name
        if not isinstance(cls, type):
            if rest:
                raise FczooError(f"{self.kind} {name} has no options; write {name} instead of {spec}")
            return cls
        words, fields = {}, [f.name for f in dataclasses.fields(cls)]
        for i, part in enumerate(p for p in rest.split(",") if p):
            key, sign, value = part.partition("=")
            if sign:
                words[key.strip()] = value.strip()
            elif i == 0 and fields:
                words[fields[0]] = key.strip()
            else:
                advice = "write NAME:VALUE or NAME:FIELD=VALUE,..."
                raise FczooError(f"cannot read {part!r} in {self.kind} {spec!r}; {advice}")
        given = {**spell_fields(fields, name, words), **options}
        return build(cls, name, given)

    def canonical(self, spec: str) -> str:
        """Return the canonical spelling of a spec: ``dirichlet`` -> ``dirichlet:0.5``.

        It states the first option as a bare value, then the other options that differ from their
        defaults, in the order of the fields. A spec that ``create`` refuses is returned unchanged.
        """
        name, _, rest = spec.partition(":")
        if self.find(name) is None:
            return spec
        try:
            if not rest and not self.options(name):  # nothing is imported for a name alone
                return self.find(name) or name
            made, words = self.create(spec), []
        except FczooError:
            return spec
        for place, field in enumerate(dataclasses.fields(made)):
            value = getattr(made, field.name)
            word = spell(value)
            if place == 0 and word and not {",", "="} & set(word):
                words.append(word)
            elif value != field.default:
                words.append(f"{field.name}={word}")
        return f"{made.name}:{','.join(words)}" if words else str(made.name)

    @cached_property
    def _found(self) -> dict[str, Found]:
        """The registrations of the packages and the installed plug-ins, read from their source."""
        found: dict[str, Found] = {}
        sources = [in_package(package, self.decorator) for package in self.packages]
        for entry in itertools.chain(*sources, in_plugins(self.decorator)):
            other = found.setdefault(entry.name, entry)
            if other.module != entry.module:
                raise self._twice(entry.name, other.module, entry.module)
            self._check_spelling(entry.name, entry.module, {k: v.module for k, v in found.items()})
        return found

    @cached_property
    def _unread(self) -> bool:
        """Whether an installed plug-in may have names that its source does not tell."""
        modules = {found.module for found in self._found.values()}
        return any(entry.module not in modules for entry in entry_points(group=PLUGINS))

    def _modules(self) -> dict[str, str]:
        """Name -> the module that defines it; without plug-ins that are known to fail."""
        if self._unread:
            load_plugins()
        registered = {name: entry.__module__ for name, entry in self._entries.items()}
        known = {name: found.module for name, found in self._found.items()} | registered
        return {name: module for name, module in known.items() if not import_error(module)}

    def _load(self, name: str) -> None:
        module = self._found[name].module
        if any(module.startswith(f"{package}.") for package in self.packages):
            importlib.import_module(module)

    def _check_spelling(self, name: str, module: str, modules: dict[str, str]) -> None:
        """Raise FczooError where ``modules`` has a name that folds to the same key as ``name``."""
        alike = next((other for other in modules if other != name and fold(other) == fold(name)), None)
        if alike is not None:
            first = f"{self.kind} {name!r} in {module} and {self.kind} {alike!r} in {modules[alike]}"
            raise FczooError(f"{first} differ only in case, - or _; rename one")

    def _unknown(self, word: str) -> FczooError:
        return FczooError(f"no {self.kind} is called {word!r}; {nearest(word, self.names())}")

    def _twice(self, name: str, first: str, second: str) -> FczooError:
        return FczooError(f"{self.kind} {name!r} is defined twice, in {first} and in {second}; rename one")


def _origin(entry: Any) -> tuple[str, str]:
    return entry.__module__, entry.__qualname__


METHODS: Registry["type[Method]"] = Registry("method", "register_method", "fczoo.methods", "fczoo.baselines")
DATASETS: Registry[Any] = Registry("data set", "register_dataset", "fczoo.datasets")
PARTITIONERS: Registry[Any] = Registry("partitioner", "register_partitioner", "fczoo.partitioners")
AGGREGATORS: Registry[Any] = Registry("aggregator", "register_aggregator", "fczoo.aggregators")
MERGES: Registry[Any] = Registry("merge", "register_merge", "fczoo.aggregators")
ATTACKS: Registry[Any] = Registry("attack", "register_attack", "fczoo.security")
LOCAL_TRAINING: Registry[Any] = Registry("local training", "register_local_training", "fczoo.federation")
PROTOCOLS: Registry[Any] = Registry("protocol", "register_protocol", "fczoo.papers.protocols")
RELEASES: Registry[Any] = Registry("release", "register_release", "fczoo.papers.releases")

SPECS = {
    "partition": PARTITIONERS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "local": LOCAL_TRAINING,
}
"""Settings that name a registered object with its options; they are kept in its canonical spelling."""

register_method = METHODS.register
register_dataset = DATASETS.register
register_partitioner = PARTITIONERS.register
register_aggregator = AGGREGATORS.register
register_merge = MERGES.register
register_attack = ATTACKS.register
register_local_training = LOCAL_TRAINING.register
register_protocol = PROTOCOLS.register
register_release = RELEASES.register


def sources(protocol: str | None, release: str | None) -> dict[str, Any]:
    """What settings come from when nothing else is given, by words for it; later ones beat earlier ones.

    Raises FczooError for an unknown name.
    """
    named = {"protocol": (PROTOCOLS, protocol), "as released:": (RELEASES, release)}
    return {
        f"{word} {kind.canonical_name(name)}": kind.get(name)
        for word, (kind, name) in named.items()
        if name and name.lower() != "none"
    }


def domains_of(dataset: str) -> tuple[str, ...]:
    """The domains of a data set, in order of arrival. Raises FczooError where it has none."""
    names: tuple[str, ...] = DATASETS.get(dataset).domains
    if not names:
        raise FczooError(f"{dataset} has no domains to be tasks; give --tasks a number")
    return names


def make_aggregator(spec: str) -> "ServerAggregator":
    """Aggregator by ``NAME``, or ``NAME:VALUE`` where it has options.

    Raises FczooError when there is none, when it merges what one method uploads and cannot stand in for
    averaging, or when a value does not fit.
    """
    name = spec.partition(":")[0]
    if MERGES.find(name):
        raise FczooError(
            f"{name} merges what one method uploads and cannot replace averaging; "
            f"take one of {', '.join(AGGREGATORS.names())}"
        )
    aggregator: ServerAggregator = AGGREGATORS.create(spec)
    return aggregator


def create_method(name: str, dataset: str | None = None, **options: Any) -> "Method":
    """Create a method by name.

    ``options`` override the method's values for ``dataset``, which override its defaults.
    Raises FczooError for an unknown method, data set or option, and for a value that does not fit.
    """
    cls = METHODS.get(name)
    fields = [field.name for field in dataclasses.fields(cls)]
    tuned = cls.tuned.get(DATASETS.get(dataset).name, {}) if dataset is not None else {}
    given = spell_fields(fields, cls.name, options)
    method: Method = build(cls, cls.name, {**tuned, **given}, f"--set {cls.name}.{{}}".format)
    return method
