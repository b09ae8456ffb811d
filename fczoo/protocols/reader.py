"""Reader of protocols and releases from TOML files (``fczoo/assets/protocols``, ``releases``)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.resources.abc import Traversable
from typing import Any, Literal, NoReturn

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import read_toml
from fczoo.protocols.stated_values import (
    EvenShare,
    Kind,
    SettingReference,
    Source,
    Statement,
    ValuesByBeta,
    ValuesByTasks,
)

Sections = dict[str, dict[str, Statement]]  # data set or method -> name -> statement

SETTING_RULES = {
    "none": "{ none = true }",
    "total": "{ total = N, least = N }",
    "tasks": "{ tasks = [N, ...], values = [...] }",
    "same_as": "{ same_as = SETTING }",
}
"""Rules for values of settings: first key of the table -> form of the table."""

OPTION_RULES = {
    "none": "{ none = true }",
    "same_as": "{ same_as = OPTION }",
    "setting": "{ setting = NAME }",
}
"""Rules for values of hyper-parameters."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the file; unknown keys are errors."""


class _Seeds(_Strict):
    source: str
    value: list[int]


class _Group(_Strict):
    """Values with one source: of settings, or of options of methods."""

    source: str
    values: dict[str, Any]
    printed: dict[str, Any] = {}  # what the paper prints, if the value has another source
    open: bool = False  # whether the paper leaves the values open
    datasets: list[str] = []  # none: every data set
    # of settings: a pre-training set; they hold on data sets that share classes with it
    shares_classes_with: str = ""
    methods: list[str] = []  # of options
    every_method: bool = False  # of options: every method that has options of these names


class _Row(_Strict):
    methods: list[str]
    options: list[str]  # options that have the row's values
    values: list[Any]  # one per data set; a list: one per partition of the data set
    printed: list[Any] = []  # what the paper prints, if the values have another source


class _Table(_Strict):
    source: str
    datasets: list[str]
    rows: list[_Row]
    open: bool = False


class _Search(_Strict):
    """Values that ``fczoo tune`` found, by method."""

    source: str
    settings: dict[str, Any]  # of the search
    methods: dict[str, dict[str, Any]]


class _Copy(_Strict):
    """Statements that a release copies from the protocol of its paper."""

    section: Literal["settings", "datasets", "methods", "dataset_options"]
    names: list[str] = []  # settings or options; none: all
    methods: list[str] = []  # none: all
    source: str = ""  # of the copies; empty: the protocol's own


class _SourceFile(_Strict):
    about: str
    proposes: list[str]
    datasets: list[str]
    seeds: _Seeds | None = None
    paper: str = ""
    release: str = ""
    partitions: dict[str, list[str]] = {}
    repository: str = ""
    protocol: str = ""  # of a release: the paper's protocol, from which ``copies`` are made
    splits: dict[str, str] = {}
    any_dataset: bool | None = None
    replaces_backbone: bool = False
    default_options: list[str] = []
    notes: list[str] = []
    copies: list[_Copy] = []
    settings: list[_Group] = []
    options: list[_Group] = []
    tables: list[_Table] = []
    search: _Search | None = None


def read_source(path: Traversable, kind: Kind, name: str, protocol: Callable[[str], Any]) -> Source:
    """Read a protocol or release.

    Args:
        path: TOML file.
        kind: Whether it is a protocol or a release.
        name: Name of the protocol or release.
        protocol: Function that returns a protocol by its name.

    Raises:
        FczooError: The file is not valid; the message names file and key.
    """
    file = read_toml(path, kind, _SourceFile)
    try:
        return replace(_Reader(file, kind, name, protocol).read(), path=str(path))
    except ValueError as error:
        raise FczooError(f"{path} is not a valid {kind}: {error}") from error


class _Reader:
    """Conversion of one file; errors are ValueError with the key."""

    def __init__(self, file: _SourceFile, kind: Kind, name: str, protocol: Callable[[str], Any]):
        self.file, self.kind, self.name = file, kind, name
        if kind == "protocol" and file.protocol:
            _refuse("protocol", "only a release names the protocol of its paper")
        self.base: Source | None = protocol(file.protocol) if file.protocol else None
        self.settings: dict[str, Statement] = {}
        self.datasets: Sections = {dataset: {} for dataset in file.datasets}
        self.methods: Sections = {}
        self.dataset_options: dict[str, Sections] = {}
        self.overlap_settings: Sections = {}
        self.common_options: dict[str, Statement] = {}

    def read(self) -> Source:
        """Return the protocol or release."""
        file = self.file
        for i, copy in enumerate(file.copies):
            self._copy(copy, f"copies[{i}]")
        for i, group in enumerate(file.settings):
            for target in self._setting_targets(group, f"settings[{i}]"):
                self._add(target, group, f"settings[{i}]", SETTING_RULES)
        for i, options in enumerate(file.options):
            for target in self._option_targets(options, f"options[{i}]"):
                self._add(target, options, f"options[{i}]", OPTION_RULES)
        for i, table in enumerate(file.tables):
            self._add_table(table, f"tables[{i}]")
        if file.search:
            self._add_search(file.search)
        return Source(
            kind=self.kind,
            name=self.name,
            about=file.about.strip(),
            proposes=tuple(file.proposes),
            seeds=self._seeds(),
            settings=self.settings,
            datasets=self.datasets,
            methods=self.methods,
            dataset_options=self.dataset_options,
            any_dataset=self.kind == "release" if file.any_dataset is None else file.any_dataset,
            replaces_backbone=file.replaces_backbone,
            overlap_settings=self.overlap_settings,
            common_options=self.common_options,
            default_options=tuple(file.default_options),
            notes=tuple(file.notes),
            paper=file.paper,
            release=file.release,
            partitions={name: tuple(specs) for name, specs in file.partitions.items()},
            repository=file.repository,
            splits=file.splits,
        )

    def _seeds(self) -> Statement:
        if self.file.seeds:
            return Statement(tuple(self.file.seeds.value), self.file.seeds.source)
        if self.base is None:
            raise ValueError("Object missing required field `seeds`")
        return self.base.seeds

    def _setting_targets(self, group: _Group, key: str) -> Iterator[dict[str, Statement]]:
        if group.methods or group.every_method:
            _refuse(
                key,
                "settings cannot depend on methods; remove methods or every_method, or write "
                "[[options]]",
            )
        if group.shares_classes_with:
            yield self.overlap_settings.setdefault(group.shares_classes_with, {})
        elif group.datasets:
            for dataset in self._known(group.datasets, key):
                yield self.datasets[dataset]
        else:
            yield self.settings

    def _option_targets(self, group: _Group, key: str) -> Iterator[dict[str, Statement]]:
        if group.shares_classes_with:
            _refuse(key, "shares_classes_with is for settings only")
        if group.every_method:
            yield self.common_options
        elif not group.methods:
            _refuse(key, "give methods, or every_method = true")
        elif group.datasets:
            for dataset in self._known(group.datasets, key):
                for method in group.methods:
                    yield self._options(dataset, method)
        else:
            for method in group.methods:
                yield self.methods.setdefault(method, {})

    def _options(self, dataset: str, method: str) -> dict[str, Statement]:
        return self.dataset_options.setdefault(dataset, {}).setdefault(method, {})

    def _known(self, datasets: list[str], key: str) -> list[str]:
        for dataset in datasets:
            if dataset not in self.datasets:
                _refuse(f"{key}.datasets", f"{dataset!r} is not in the file's list of data sets")
        return datasets

    def _add(
        self, target: dict[str, Statement], group: _Group, key: str, rules: Mapping[str, str]
    ) -> None:
        if unknown := group.printed.keys() - group.values.keys():
            _refuse(f"{key}.printed", f"{', '.join(sorted(unknown))} has no value")
        for name, raw in group.values.items():
            printed = group.printed.get(name, ...)
            target[name] = Statement(
                _value(raw, f"{key}.values.{name}", target, rules),
                group.source,
                printed
                if printed is ...
                else _value(printed, f"{key}.printed.{name}", target, rules),
                group.open,
            )

    def _add_table(self, table: _Table, key: str) -> None:
        datasets = self._known(table.datasets, key)
        for i, row in enumerate(table.rows):
            row_key = f"{key}.rows[{i}]"
            values = self._cells(datasets, row.values, f"{row_key}.values")
            printed: list[Any] = [...] * len(datasets)
            if row.printed:
                printed = self._cells(datasets, row.printed, f"{row_key}.printed")
            for dataset, value, print_value in zip(datasets, values, printed, strict=True):
                statement = Statement(value, table.source, print_value, table.open)
                for method in row.methods:
                    self._options(dataset, method).update(dict.fromkeys(row.options, statement))

    def _cells(self, datasets: list[str], cells: list[Any], key: str) -> list[Any]:
        """Return the cells of a row, one per data set."""
        if len(cells) != len(datasets):
            _refuse(key, f"{len(cells)} values for {len(datasets)} data sets")
        if any(isinstance(cell, dict) for cell in cells):
            _refuse(key, "give values, or lists with one value per partition")
        return [
            self._by_beta(dataset, cell, key) if isinstance(cell, list) else cell
            for dataset, cell in zip(datasets, cells, strict=True)
        ]

    def _by_beta(self, dataset: str, cell: list[Any], key: str) -> ValuesByBeta:
        """Return a cell with one value per partition of a data set."""
        partitions = self.file.partitions.get(dataset, [])
        try:
            betas = [float(spec.removeprefix("dirichlet:").split(",")[0]) for spec in partitions]
        except ValueError:
            _refuse(f"partitions.{dataset}", "lists of values need partitions dirichlet:BETA")
        if not cell or len(betas) != len(cell):
            _refuse(key, f"{len(cell)} values for the {len(betas)} partitions of {dataset}")
        return ValuesByBeta(dict(zip(betas, cell, strict=True)))

    def _add_search(self, search: _Search) -> None:
        if "dataset" not in search.settings:
            _refuse("search.settings", "give the dataset of the search")
        for method, values in search.methods.items():
            target = self.methods.setdefault(method, {})
            for name, value in values.items():
                target[name] = Statement(value, search.source, chosen_for=search.settings)

    def _copy(self, copy: _Copy, key: str) -> None:
        if self.base is None:
            _refuse(key, "the file names no protocol to copy from")
        sections: Mapping[str, Any] = getattr(self.base, copy.section)
        if copy.section == "settings":
            self.settings |= _select_statements(self.base.settings, copy)
        elif copy.section == "dataset_options":
            for dataset in self._known([*sections], key):
                for method, statements in self.base.dataset_options[dataset].items():
                    if not copy.methods or method in copy.methods:
                        self._options(dataset, method).update(_select_statements(statements, copy))
        else:
            by_dataset = copy.section == "datasets"
            targets = self.datasets if by_dataset else self.methods
            for name in self._known([*sections], key) if by_dataset else sections:
                if by_dataset or not copy.methods or name in copy.methods:
                    targets.setdefault(name, {}).update(_select_statements(sections[name], copy))


def _select_statements(statements: Mapping[str, Statement], copy: _Copy) -> dict[str, Statement]:
    """Return the named statements, under another source if there is one."""
    return {
        name: Statement(statement.value, copy.source) if copy.source else statement
        for name, statement in statements.items()
        if not copy.names or name in copy.names
    }


def _value(raw: Any, key: str, siblings: Mapping[str, Statement], rules: Mapping[str, str]) -> Any:
    """Return the value of a key: lists become tuples, and tables become rules.

    A rule is the absence of a value, a total that tasks share, or values by number of tasks. It may
    also name another option of the group, or a setting of the run, and copy its value. ``rules``
    has the rules that are valid here: first key of the table -> form of the table.
    """
    if isinstance(raw, list):
        return tuple(_value(item, key, siblings, rules) for item in raw)
    if not isinstance(raw, dict):
        return raw
    match raw:
        case _ if not rules.keys() & raw.keys():
            pass
        case {"none": True} if len(raw) == 1:
            return None
        case {"total": int(total)} if len(raw) == 1:
            return EvenShare(total)
        case {"total": int(total), "least": int(least)} if len(raw) == 2:
            return EvenShare(total, least)
        case {"same_as": str(name)} if len(raw) == 1 and name in siblings:
            return siblings[name].value
        case {"setting": str(name)} if len(raw) == 1:
            return SettingReference(name)
        case {"tasks": [_, *_] as tasks, "values": [*values], **more} if (
            not more
            and len(tasks) == len(values)
            and all(isinstance(number, int) for number in tasks)
        ):
            return ValuesByTasks(dict(zip(tasks, values, strict=True)))
    _refuse(key, f"a table must be {' or '.join(rules.values())}")


def _refuse(key: str, problem: str) -> NoReturn:
    raise ValueError(f"{key}: {problem}")
