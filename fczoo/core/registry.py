"""Registries of methods, data sets, partitioners, aggregators and other objects with a name.

A file in the right folder registers itself, as does a plug-in (entry point ``fczoo.plugins``).
"""

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fczoo.core.discovery import (
    Registration,
    declared_options,
    first_paragraph,
    import_error,
    load_plugins,
    package_registrations,
    plugin_entries,
    plugin_registrations,
)
from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.names import fold, match
from fczoo.core.options import (
    OptionDeclaration,
    build,
    dataclass_options,
    nearest,
    quote,
    spell,
    spell_fields,
)

if TYPE_CHECKING:
    from fczoo.core.method import Method
    from fczoo.core.types import ServerAggregator

Entry = TypeVar("Entry")
DecoratedObject = TypeVar("DecoratedObject")


class Registry(Generic[Entry]):
    """Name -> class or function of one kind, filled by decorators in modules imported on demand.

    Names are matched without regard to case, ``-`` and ``_``; the registered spelling is stored and
    shown.
    """

    def __init__(self, kind: str, decorator: str, *packages: str):
        """Create an empty registry.

        Args:
            kind: Noun for messages, such as ``method``.
            decorator: Name of the decorator, by which registrations are found in source.
            *packages: Packages whose modules hold registrations.
        """
        self.kind, self.decorator, self.packages = kind, decorator, packages
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[DecoratedObject], DecoratedObject]:
        """Return a decorator that registers a class or function and keeps its type.

        Args:
            name: Name of the entry.

        Raises:
            FczooError: Another object has the name or one that differs from it only in case, ``-``
                or ``_``, or a class with options is not a dataclass.
        """

        def add(entry: Any) -> Any:
            if any(isinstance(value, dataclasses.Field) for value in vars(entry).values()):
                problem = (
                    f"{entry.__qualname__} in {entry.__module__} has options and is not a dataclass"
                )
                raise FczooError(f"{problem}; write @dataclass(frozen=True) above the class")
            obj: Any = self._entries.get(name)
            origin = (entry.__module__, entry.__qualname__)
            if obj is not None and (obj.__module__, obj.__qualname__) != origin:
                raise self._duplicate_error(name, obj.__module__, entry.__module__)
            read = self.__dict__.get("_registrations", {})  # no sources are read for this check
            modules = {key: read[key].module for key in read}
            modules |= {k: obj.__module__ for k, obj in self._entries.items()}
            self._check_spelling(name, entry.__module__, modules)
            self._entries[name] = entry
            entry.name = name
            return entry

        return add

    def get(self, name: str) -> Entry:
        """Return an entry; its module is imported if necessary.

        Args:
            name: Name in any spelling.

        Raises:
            FczooError: The name is unknown (the message has the nearest ones), or its module cannot
                be imported.
        """
        if not isinstance(name, str):
            raise FczooError(f"{quote(name)} is not the name of a {self.kind}; give a string")
        name = self.find(name) or name
        record = self._registrations.get(name)
        if name not in self._entries and record:
            self._load(name)
        if name not in self._entries:
            load_plugins()
        module = record.module if record else getattr(self._entries.get(name), "__module__", "")
        if reason := import_error(module):
            problem = f"{self.kind} {name} is in {module}, which cannot be imported: {reason}"
            raise FczooError(f"{problem}; fix or uninstall that plug-in")
        if name not in self._entries:
            raise self._unknown_error(name)
        return self._entries[name]

    def find(self, word: str) -> str | None:
        """Return the registered spelling of a name, None for an unknown one.

        Args:
            word: Name in any spelling.
        """
        if word in self._registrations or word in self._entries:
            return word
        if self._has_dynamic_plugins:
            load_plugins()
        return match(word, [*self._registrations, *self._entries])

    def canonical_name(self, word: str) -> str:
        """Return the registered spelling of a name.

        Args:
            word: Name in any spelling.

        Raises:
            FczooError: The name is unknown; the message has the nearest ones.
        """
        name = self.find(word)
        if name is None:
            raise self._unknown_error(word)
        return name

    def names(self, package: str | None = None) -> list[str]:
        """Return all names, sorted.

        Only plug-ins whose names cannot be read from their source are imported.

        Args:
            package: Package to which the names are limited.
        """
        modules = self._modules()
        return sorted(name for name in modules if not package or modules[name].startswith(package))

    def about(self, name: str) -> str:
        """Return one line about an entry, read from its source, without an import if possible."""
        name = self.find(name) or name
        if name in self._registrations:
            return self._registrations[name].about
        entry = self.get(name)
        return getattr(entry, "about", "") or first_paragraph(entry.__doc__ or "")

    def options(self, name: str) -> dict[str, OptionDeclaration]:
        """Return the options of an entry by field, read from its source if that shows them.

        Args:
            name: Name in any spelling.
        """
        name = self.find(name) or name
        if name in self._registrations:
            registration = self._registrations[name]
            with contextlib.suppress(ValueError):
                return declared_options(registration.module, registration.symbol)
        entry: Any = self.get(name)
        is_dataclass = isinstance(entry, type) and dataclasses.is_dataclass(entry)
        return dataclass_options(entry) if is_dataclass else {}

    def create(self, spec: str, **options: Any) -> Any:
        """Create a registered entry from ``NAME``, ``NAME:VALUE`` or ``NAME:FIELD=VALUE,...``.

        A bare ``VALUE`` sets the first field, and ``NAME:FIELD:VALUE`` the named one. A registered
        function is returned as it is.

        Args:
            spec: Name and options of the entry.
            **options: Values of fields, which override those in ``spec``.

        Raises:
            FczooError: A name or field is unknown, or a value is missing or does not fit.
        """
        name, colon, option_text = spec.partition(":")
        cls: Any = self.get(name)
        name = self.find(name) or name
        if colon and not option_text.strip(", "):
            problem = f"{self.kind} {spec!r} has no value after the colon"
            raise FczooError(f"{problem}; write {self.canonical(name)}")
        if not isinstance(cls, type):
            if option_text:
                problem = f"{self.kind} {name} has no options"
                raise FczooError(f"{problem}; write {name} instead of {spec}")
            return cls
        words, fields = {}, [f.name for f in dataclasses.fields(cls)]
        for i, part in enumerate(p for p in option_text.split(",") if p):
            key, sign, value = part.partition("=")
            if sign:
                words[key.strip()] = value.strip()
            elif i == 0 and fields:
                field, colon, rest = key.strip().partition(":")
                named = {field: rest} if colon and match(field, fields) else {}
                words |= named or {fields[0]: key.strip()}
            else:
                problem = f"cannot read {part!r} in {self.kind} {spec!r}"
                raise FczooError(f"{problem}; write NAME:VALUE or NAME:FIELD=VALUE,...")
        return build(cls, name, {**spell_fields(fields, name, words), **options})

    def canonical(self, spec: str) -> str:
        """Return the canonical spelling of a spec: ``dirichlet`` -> ``dirichlet:0.5``.

        It states the first option as a bare value, then the other options that differ from their
        defaults, in the order of the fields.

        Args:
            spec: Spec of ``create``; one that ``create`` refuses is returned unchanged.
        """
        name, colon, _ = spec.partition(":")
        key = self.find(name)
        if key is None:
            return spec
        try:
            if not colon and not self.options(key):  # nothing is imported for a name only
                return key
            instance, words = self.create(spec), []
        except FczooError:
            return spec
        for position, field in enumerate(dataclasses.fields(instance)):
            value = getattr(instance, field.name)
            spelling = spell(value)
            if position == 0 and value is not None and spelling and not {",", "="} & set(spelling):
                words.append(spelling)
            elif value != field.default:
                words.append(f"{field.name}={spelling}")
        return f"{instance.name}:{','.join(words)}" if words else str(instance.name)

    @cached_property
    def _registrations(self) -> dict[str, Registration]:
        """Return the registrations of the packages and plug-ins, read from their source."""
        records: dict[str, Registration] = {}
        sources = [package_registrations(package, self.decorator) for package in self.packages]
        for entry in itertools.chain(*sources, plugin_registrations(self.decorator)):
            first = records.setdefault(entry.name, entry)
            if first.module != entry.module:
                raise self._duplicate_error(entry.name, first.module, entry.module)
            self._check_spelling(
                entry.name, entry.module, {k: v.module for k, v in records.items()}
            )
        return records

    @cached_property
    def _has_dynamic_plugins(self) -> bool:
        """Return whether an installed plug-in may register names that its source does not show."""
        modules = {record.module for record in self._registrations.values()}
        return any(entry.module not in modules for entry in plugin_entries())

    def _modules(self) -> dict[str, str]:
        """Return name -> module that defines it, without plug-ins that are known to fail."""
        if self._has_dynamic_plugins:
            load_plugins()
        imports = {name: entry.__module__ for name, entry in self._entries.items()}
        modules = {name: record.module for name, record in self._registrations.items()} | imports
        return {name: module for name, module in modules.items() if not import_error(module)}

    def _load(self, name: str) -> None:
        module = self._registrations[name].module
        if any(module.startswith(f"{package}.") for package in self.packages):
            importlib.import_module(module)

    def _check_spelling(self, name: str, module: str, modules: dict[str, str]) -> None:
        """Raise FczooError if ``modules`` has a name that folds to the same key as ``name``."""
        alike = next((key for key in modules if key != name and fold(key) == fold(name)), None)
        if alike is not None:
            first = f"{self.kind} {name!r} in {module}"
            second = f"{self.kind} {alike!r} in {modules[alike]}"
            raise FczooError(f"{first} and {second} differ only in case, - or _; rename one")

    def _unknown_error(self, word: str) -> FczooError:
        return FczooError(f"no {self.kind} is called {word!r}; {nearest(word, self.names())}")

    def _duplicate_error(self, name: str, first: str, second: str) -> FczooError:
        return FczooError(
            f"{self.kind} {name!r} is defined twice, in {first} and in {second}; rename one"
        )


class DatasetRegistry(Registry[Any]):
    """Registry of data sets, where ``NAME:SOURCE`` selects one of many that ``NAME`` reads.

    The class of such a ``NAME`` has a class method ``select``, which maps a source to a class.
    """

    def get(self, name: str) -> Any:
        return self._select(name) or super().get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.names() or self._select(name) is not None

    def find(self, word: str) -> str | None:
        entry = self._select(word)
        return entry.name if entry else super().find(word)

    def canonical(self, spec: str) -> str:
        return self.find(spec) or spec

    def _select(self, word: str) -> Any:
        """Return the class of ``NAME:SOURCE``; None for text of another form."""
        name, colon, source = word.partition(":") if isinstance(word, str) else ("", "", "")
        if not colon or super().find(name) is None:
            return None
        select = getattr(super().get(name), "select", None)
        return select(source) if select else None


METHODS: Registry["type[Method]"] = Registry(
    "method", "register_method", "fczoo.methods", "fczoo.baselines"
)
DATASETS = DatasetRegistry("data set", "register_dataset", "fczoo.datasets")
PARTITIONERS: Registry[Any] = Registry("partitioner", "register_partitioner", "fczoo.partitioners")
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "register_augmentation", "fczoo.data")
AGGREGATORS: Registry[Any] = Registry("aggregator", "register_aggregator", "fczoo.aggregators")
MERGES: Registry[Any] = Registry("merge", "register_merge", "fczoo.aggregators")
ATTACKS: Registry[Any] = Registry("attack", "register_attack", "fczoo.security")
LOCAL_TRAINING: Registry[Any] = Registry(
    "local training", "register_local_training", "fczoo.federation"
)
SERVER_OPTIMIZERS: Registry[Any] = Registry(
    "server optimizer", "register_server_optimizer", "fczoo.federation"
)
COMPRESSIONS: Registry[Any] = Registry("compression", "register_compression", "fczoo.federation")

SPECS = {
    "partition": PARTITIONERS,
    "augment": AUGMENTATIONS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "local": LOCAL_TRAINING,
    "server_optimizer": SERVER_OPTIMIZERS,
    "compress": COMPRESSIONS,
}
"""Settings that name a registered object with its options, and its registry."""

register_method = METHODS.register
register_dataset = DATASETS.register
register_partitioner = PARTITIONERS.register
register_augmentation = AUGMENTATIONS.register
register_aggregator = AGGREGATORS.register
register_merge = MERGES.register
register_attack = ATTACKS.register
register_local_training = LOCAL_TRAINING.register
register_server_optimizer = SERVER_OPTIMIZERS.register
register_compression = COMPRESSIONS.register


def make_aggregator(spec: str) -> "ServerAggregator":
    """Create an aggregator that can replace a method's averaging.

    Args:
        spec: ``NAME``, or ``NAME:VALUE`` if it has options.

    Raises:
        FczooError: The name is unknown or that of a method's merge, or a value does not fit.
    """
    name = spec.partition(":")[0]
    if MERGES.find(name):
        raise FczooError(
            f"aggregator {name} belongs to one method and cannot replace averages; "
            f"use one of {', '.join(AGGREGATORS.names())}"
        )
    aggregator: ServerAggregator = AGGREGATORS.create(spec)
    return aggregator


@use_python_names
def create_method(name: str, dataset: str | None = None, **options: Any) -> "Method":
    """Create a method by name.

    Args:
        name: Name of the method in any spelling.
        dataset: Data set whose values in ``dataset_options`` override the method's defaults.
        **options: Hyper-parameters, which override both.

    Raises:
        FczooError: A method, data set or option is unknown, or a value does not fit.
    """
    cls = METHODS.get(name)
    fields = [field.name for field in dataclasses.fields(cls)]
    presets = cls.dataset_options.get(DATASETS.get(dataset).name, {}) if dataset is not None else {}
    settings = spell_fields(fields, cls.name, options)
    method: Method = build(cls, cls.name, {**presets, **settings}, f"--set {cls.name}.{{}}".format)
    return method
