"""Protocols of papers and releases: settings and hyper-parameters, each with its source."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fczoo.core.errors import FczooError
from fczoo.core.options import nearest
from fczoo.core.registry import DATASETS
from fczoo.reports.text_format import option_word

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class ByBeta:
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
class Statement:
    """A value and its source.

    A function is a rule of the number of tasks; ``ByBeta`` one of the partition.
    """

    value: Any | Callable[[int], Any] | ByBeta
    source: str
    printed: Any = ...  # what the paper prints, where the value follows something else
    open: bool = False  # the paper does not state it: any value of a run agrees with it
    # settings for which the value was chosen, where they are not the source's own
    chosen_for: Mapping[str, Any] | None = None

    def has(self, value: Any) -> bool:
        """Return whether ``value`` is the stated one, or that of one concentration.

        Args:
            value: Value of a setting or option.
        """
        values = self.value.values.values() if isinstance(self.value, ByBeta) else [self.value]
        return value in values

    @property
    def text(self) -> str:
        """Format the value, or the values of several betas side by side."""
        if callable(self.value):
            return "by the number of tasks"
        values = self.value.values.values() if isinstance(self.value, ByBeta) else [self.value]
        return " | ".join(map(option_word, values))

    @property
    def print_word(self) -> str:
        """Describe the deviation from the print; empty if there is none."""
        if self.open:
            return "open"
        return "" if self.printed is ... else option_word(self.printed)

    def value_for(self, tasks: int) -> Any:
        """Return the value, or what its rule gives for a number of tasks.

        Args:
            tasks: Number of tasks.
        """
        return self.value(tasks) if callable(self.value) else self.value


class Source:
    """Source of default settings; omitted ones follow fczoo's own schedule.

    A registered source may name data sets and methods that are not installed.
    """

    name: ClassVar[str] = ""
    proposes: ClassVar[tuple[str, ...]]  # methods that bench runs when none is named
    seeds: ClassVar[Statement]
    settings: ClassVar[Mapping[str, Statement]]  # fields of Settings on every data set
    datasets: ClassVar[Mapping[str, Mapping[str, Statement]]]  # data set -> fields of Settings
    any_dataset: ClassVar[bool] = False  # whether data sets other than those may be used
    # whether its backbone replaces the data set's without an option of the user
    replaces_backbone: ClassVar[bool] = False
    # method -> hyper-parameters on every data set
    methods: ClassVar[Mapping[str, Mapping[str, Statement]]] = {}
    # data set -> method -> hyper-parameters
    dataset_options: ClassVar[Mapping[str, Mapping[str, Mapping[str, Statement]]]] = {}
    notes: ClassVar[tuple[str, ...]] = ()  # readings, contradictions and what cannot be followed

    @classmethod
    def settings_on(cls, dataset: str) -> dict[str, Statement]:
        """Return the settings on a data set.

        Args:
            dataset: Name of the data set.

        Returns:
            Field of ``Settings`` -> its statement.

        Raises:
            FczooError: The data set is unknown, or the paper does not use it.
        """
        name = cls.resolve(dataset)
        if name not in cls.datasets and not cls.any_dataset:
            advice = nearest(name, list(cls.datasets))
            raise FczooError(f"protocol {cls.name} does not use {name}; {advice}")
        return {**cls.settings, **cls.datasets.get(name, {})}

    @classmethod
    def resolve(cls, dataset: str) -> str:
        """Return the registered name of a data set, or the name of one that only this source knows.

        Args:
            dataset: Name of the data set.

        Raises:
            FczooError: The data set is unknown; the message gives the nearest names.
        """
        source_datasets = {*cls.datasets, *cls.dataset_options}
        if dataset in source_datasets:
            return dataset
        return str(DATASETS.get(dataset).name)

    @classmethod
    def hyperparameters(cls, method: str, dataset: str) -> dict[str, Statement]:
        """Return what the protocol states for a method on a data set; empty where it says nothing.

        Args:
            method: Name of the method.
            dataset: Name of the data set.

        Returns:
            Option of the method -> its statement.

        Raises:
            FczooError: The data set is unknown.
        """
        dataset_methods = cls.dataset_options.get(cls.resolve(dataset), {})
        return {**cls.methods.get(method, {}), **dataset_methods.get(method, {})}

    @classmethod
    def everything(cls) -> dict[tuple[str, str], list[Statement]]:
        """Return all statements on any data set, by owner and field.

        An owner is a method, or ``bench`` for settings.
        """
        statements: dict[tuple[str, str], list[Statement]] = {}
        sections = [
            ("bench", cls.settings),
            *(("bench", values) for values in cls.datasets.values()),
        ]
        sections += cls.methods.items()
        sections += [item for methods in cls.dataset_options.values() for item in methods.items()]
        for owner, values in sections:
            for field, statement in values.items():
                statements.setdefault((owner, field), []).append(statement)
        return statements

    @classmethod
    def options(cls, method: str, dataset: str, beta: float | None) -> dict[str, Any]:
        """Return the stated values; those of a partition's columns for ``beta``.

        It logs a warning where the columns do not cover ``beta``.

        Args:
            method: Name of the method.
            dataset: Name of the data set.
            beta: Concentration of the Dirichlet split; None: another partition.

        Returns:
            Option of the method -> value.

        Raises:
            FczooError: The data set is unknown.
        """
        out = {}
        for field, statement in cls.hyperparameters(method, dataset).items():
            value = statement.value
            if isinstance(value, ByBeta):
                if not value.covers(beta):
                    words = "%s states %s.%s as %s; the first is used"
                    log.warning(words, cls.name, method, field, value)
                value = value.at(beta)
            out[field] = value
        return out


class Protocol(Source):
    """One paper's experiments, as class attributes."""

    paper: ClassVar[str]
    release: ClassVar[str] = ""  # name of its released code; empty where none is public
    partitions: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # data set -> all splits of the paper


class Release(Source):
    """Behaviour of released code: options, learning rates and schedule.

    It states a fact about code, not about a paper; a protocol of the paper may be followed next to
    it, and gives way to it.
    """

    repository: ClassVar[str]  # owner/name, and the commit that was read where it is known
    # partitioner of the paper -> that of the code, where it differs
    splits: ClassVar[Mapping[str, str]] = {}
    any_dataset = True

    @classmethod
    def split(cls, spec: str) -> str:
        """Return a partition of the paper as the code draws it.

        Args:
            spec: Partition as ``--partition`` takes it.
        """
        name, colon, arguments = spec.partition(":")
        return f"{cls.splits.get(name, name)}{colon}{arguments}"


def state(source: str, *, open: bool = False, **values: Any) -> dict[str, Statement]:
    """State several values with one source.

    Args:
        source: Source of all the values.
        open: Whether the paper leaves them open.
        **values: Name of a setting or option -> value.

    Returns:
        Name -> its statement.
    """
    return {name: Statement(value, source, open=open) for name, value in values.items()}
