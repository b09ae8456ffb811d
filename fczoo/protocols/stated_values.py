"""Protocols and releases: statements, which are values with sources, and rules for values."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from fczoo.core.errors import FczooError
from fczoo.core.options import nearest
from fczoo.core.registry import DATASETS, METHODS


@dataclass(frozen=True)
class ValuesByBeta:
    """Values by concentration of the Dirichlet split, as in the columns of a paper's table."""

    values: Mapping[float, Any]

    def at(self, beta: float | None) -> Any:
        """Return the value for ``beta``; that of the first column for other partitions.

        Args:
            beta: Concentration of the Dirichlet split; None: another partition.
        """
        return self.values.get(beta, next(iter(self.values.values())))  # type: ignore[arg-type]

    def covers(self, beta: float | None) -> bool:
        """Return whether the paper's columns are equal or include ``beta``.

        Args:
            beta: Concentration of the Dirichlet split; None: another partition.
        """
        return beta in self.values or len(set(self.values.values())) == 1

    def __str__(self) -> str:
        return (
            f"{' | '.join(map(str, self.values.values()))} at beta "
            f"{' | '.join(map(str, self.values))}"
        )


@dataclass(frozen=True)
class ValuesByTasks:
    """Values by the largest number of tasks to which each applies; more tasks have the last one."""

    values: Mapping[int, Any]

    def at(self, tasks: int) -> Any:
        """Return the value for a number of tasks.

        Args:
            tasks: Number of tasks.
        """
        limit = next((n for n in self.values if tasks <= n), [*self.values][-1])
        return self.values[limit]


@dataclass(frozen=True)
class EvenShare:
    """A total that all tasks share evenly, rounded down."""

    total: int
    least: int = 0

    def at(self, tasks: int) -> int:
        """Return the share of each task.

        Args:
            tasks: Number of tasks.
        """
        return max(self.total // tasks, self.least)


@dataclass(frozen=True)
class SettingReference:
    """The value of a setting of the run."""

    name: str


@dataclass(frozen=True)
class Statement:
    """A value and its source."""

    value: Any  # plain, by the number of tasks, or by the partition
    source: str
    printed: Any = ...  # what the paper prints, where the value follows something else
    open: bool = False  # the paper does not state it: any value of a run agrees with it
    # settings for which the value was chosen, if they are not the source's own
    chosen_for: Mapping[str, Any] | None = None

    @property
    def depends_on_tasks(self) -> bool:
        """Return whether the value is a rule of the number of tasks."""
        return isinstance(self.value, ValuesByTasks | EvenShare)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Return the value, or the values of several concentrations."""
        return (
            tuple(self.value.values.values())
            if isinstance(self.value, ValuesByBeta)
            else (self.value,)
        )

    def value_for(self, tasks: int) -> Any:
        """Return the value; of a rule, the value for a number of tasks.

        Args:
            tasks: Number of tasks.
        """
        return (
            self.value.at(tasks)
            if isinstance(self.value, ValuesByTasks | EvenShare)
            else self.value
        )


log = logging.getLogger("fczoo")

Kind = Literal["protocol", "release"]
Statements = Mapping[str, Statement]
OVERLAP_DEGREES = ("all", "some")  # degrees of overlap at which data sets share classes


@dataclass(frozen=True, eq=False)
class Source:
    """A paper's protocol, or the behaviour of released code: default settings of runs.

    Omitted settings follow fczoo's own schedule. A source may name data sets and methods that are
    not installed. A release states a fact about code: it takes precedence over a protocol.
    """

    kind: Kind
    name: str
    about: str
    proposes: tuple[str, ...]  # methods that bench runs when none is named
    seeds: Statement
    settings: Statements  # fields of Settings on every data set
    datasets: Mapping[str, Statements]  # data set -> fields of Settings
    methods: Mapping[str, Statements] = field(default_factory=dict)  # on every data set
    # data set -> method -> hyper-parameters
    dataset_options: Mapping[str, Mapping[str, Statements]] = field(default_factory=dict)
    any_dataset: bool = False  # whether data sets other than those may be used
    # whether its backbone replaces the data set's without an option of the user
    replaces_backbone: bool = False
    # pre-training set -> fields of Settings on data sets that share classes with it
    overlap_settings: Mapping[str, Statements] = field(default_factory=dict)
    # hyper-parameters of every method that has an option of that name and accepts the value
    common_options: Statements = field(default_factory=dict)
    default_options: tuple[str, ...] = ()  # data sets on which methods have their own options
    notes: tuple[str, ...] = ()  # readings, contradictions and what cannot be followed
    # of protocols
    paper: str = ""
    release: str = ""  # name of its released code; empty where none is public
    # data set -> all splits of the paper
    partitions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of releases
    repository: str = ""  # owner/name, and the commit that was read where it is known
    # partitioner of the paper -> partitioner of the code, if it differs
    splits: Mapping[str, str] = field(default_factory=dict)
    path: str = ""  # its file, for messages

    @cache  # noqa: B019 - a source lives as long as the process
    def check_names(self, settings: frozenset[str]) -> None:
        """Check the names of settings, methods and their options; warn of unknown methods.

        A method may belong to a plug-in that is not installed.

        Args:
            settings: Names of all settings.

        Raises:
            FczooError: A setting or an option of a method is unknown; the message names the file.
        """
        for owner, name in self.all_statements():
            known = settings if owner == "bench" else METHODS.find(owner) and METHODS.options(owner)
            if known is None:
                log.warning(
                    "%s has options of %s, which is not installed; %s",
                    *(self.path, owner, nearest(owner, METHODS.names())),
                )
            elif name not in known:
                full_name = name if owner == "bench" else f"{owner}.{name}"
                advice = nearest(name, sorted(known))
                raise FczooError(f"{self.path}: {full_name} is not an option; {advice}")

    def settings_on(self, dataset: str) -> dict[str, Statement]:
        """Return the settings on a data set.

        Args:
            dataset: Name of the data set.

        Returns:
            Field of ``Settings`` -> its statement.

        Raises:
            FczooError: The data set is unknown, or the paper does not use it.
        """
        name = self.resolve(dataset)
        if name not in self.datasets and not self.any_dataset:
            advice = nearest(name, list(self.datasets))
            raise FczooError(f"protocol {self.name} does not use {name}; {advice}")
        statements = {**self.settings, **self.datasets.get(name, {})}
        if self.overlap_settings and name in DATASETS:
            overlaps = DATASETS.get(name).overlaps
            for pretraining_set, values in self.overlap_settings.items():
                statements |= values if overlaps.get(pretraining_set) in OVERLAP_DEGREES else {}
        return statements

    def resolve(self, dataset: str) -> str:
        """Return the registered name of a data set, or the name of one that only this source knows.

        Args:
            dataset: Name of the data set.

        Raises:
            FczooError: The data set is unknown; the message gives the nearest names.
        """
        if dataset in self.datasets:
            return dataset
        return str(DATASETS.get(dataset).name)

    def hyperparameters(self, method: str, dataset: str) -> dict[str, Statement]:
        """Return the statements about a method on a data set; empty if the source has none.

        Args:
            method: Name of the method.
            dataset: Name of the data set.

        Returns:
            Option of the method -> its statement.

        Raises:
            FczooError: The data set is unknown.
        """
        name = self.resolve(dataset)
        if name in self.default_options:
            return {}
        return {
            **self._accepted_options(method),
            **self.methods.get(method, {}),
            **self.dataset_options.get(name, {}).get(method, {}),
        }

    def _accepted_options(self, method: str) -> dict[str, Statement]:
        """Return the common options that a method has; plug-ins may use a name differently."""
        if not self.common_options or method not in METHODS.names():
            return {}
        hints = get_type_hints(METHODS.get(method))
        return {
            name: statement
            for name, statement in self.common_options.items()
            if name in hints and _accepts(hints[name], statement.value)
        }

    def all_statements(self) -> dict[tuple[str, str], list[Statement]]:
        """Return all statements on any data set, by owner and field.

        An owner is a method, or ``bench`` for settings.
        """
        statements: dict[tuple[str, str], list[Statement]] = {}
        for owner, values in self._sections():
            for name, statement in values.items():
                statements.setdefault((owner, name), []).append(statement)
        return statements

    def _sections(self) -> Iterator[tuple[str, Statements]]:
        for values in (
            self.settings,
            *self.datasets.values(),
            *self.overlap_settings.values(),
        ):
            yield "bench", values
        for methods in (self.methods, *self.dataset_options.values()):
            yield from methods.items()

    def options(
        self,
        method: str,
        dataset: str,
        beta: float | None,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the stated options of a method in a run; ``beta`` selects the paper's column.

        It logs a warning if the columns do not cover ``beta``.

        Args:
            method: Name of the method.
            dataset: Name of the data set.
            beta: Concentration of the Dirichlet split; None: another partition.
            settings: Settings of the run by name, from which some values are copied; None: leave
                these values out.

        Returns:
            Option of the method -> value.

        Raises:
            FczooError: The data set is unknown.
        """
        out = {}
        for name, statement in self.hyperparameters(method, dataset).items():
            value = statement.value
            if isinstance(value, SettingReference):
                if settings is None:
                    continue
                value = settings[value.name]
            if isinstance(value, ValuesByBeta):
                if not value.covers(beta):
                    words = "%s states %s.%s as %s; this run uses the first value"
                    log.warning(words, self.name, method, name, value)
                value = value.at(beta)
            out[name] = value
        return out

    def split(self, spec: str) -> str:
        """Return a partition of the paper as the code draws it.

        Args:
            spec: Partition as ``--partition`` takes it.
        """
        name, colon, arguments = spec.partition(":")
        return f"{self.splits.get(name, name)}{colon}{arguments}"


def _accepts(hint: Any, value: Any) -> bool:
    """Return whether an option of a type accepts a value."""
    return isinstance(value, bool) if hint is bool else value in get_args(hint)
