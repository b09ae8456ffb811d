"""How a paper or its released code runs experiments: settings and hyper-parameters, each with its source."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fczoo.core.errors import FczooError
from fczoo.core.options import nearest
from fczoo.core.registry import DATASETS
from fczoo.reports.words import option_word

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class ByBeta:
    """A value for each concentration of the Dirichlet split, as a paper's columns have them."""

    values: Mapping[float, Any]

    def at(self, beta: float | None) -> Any:
        """The value for ``beta``; for a split that the paper does not have, the first column's."""
        return self.values.get(beta, next(iter(self.values.values())))  # type: ignore[arg-type]

    def covers(self, beta: float | None) -> bool:
        """False where the paper's columns differ and ``beta`` is none of them."""
        return beta in self.values or len(set(self.values.values())) == 1

    def __str__(self) -> str:
        return f"{' | '.join(map(str, self.values.values()))} at beta {' | '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Stated:
    """A value and where it stands.

    A function is a rule of the number of tasks; ``ByBeta`` one of the partition.
    """

    value: Any | Callable[[int], Any] | ByBeta
    source: str
    printed: Any = ...  # what the paper prints, where the value follows something else
    open: bool = False  # the paper does not say: whatever a run has agrees with it
    # settings for which the value was chosen, where they are not the source's own
    chosen_for: Mapping[str, Any] | None = None

    def has(self, value: Any) -> bool:
        """Return whether ``value`` is the stated one, or that of one concentration."""
        stated = self.value.values.values() if isinstance(self.value, ByBeta) else [self.value]
        return value in stated

    @property
    def word(self) -> str:
        """The value in words, those of several betas side by side."""
        if callable(self.value):
            return "by the number of tasks"
        values = self.value.values.values() if isinstance(self.value, ByBeta) else [self.value]
        return " | ".join(map(option_word, values))

    @property
    def print_word(self) -> str:
        """What a reader must know of the print; empty where the value is the print's."""
        if self.open:
            return "open"
        return "" if self.printed is ... else option_word(self.printed)

    def given(self, tasks: int) -> Any:
        return self.value(tasks) if callable(self.value) else self.value


class Source:
    """Where settings come from when nothing else is given; what is left out follows fczoo's own defaults.

    A registered source may name data sets and methods that are not installed.
    """

    name: ClassVar[str] = ""
    proposes: ClassVar[tuple[str, ...]]  # methods that bench runs when none is named
    seeds: ClassVar[Stated]
    settings: ClassVar[Mapping[str, Stated]]  # fields of Settings on every data set
    datasets: ClassVar[Mapping[str, Mapping[str, Stated]]]  # data set -> fields of Settings
    any_dataset: ClassVar[bool] = False  # whether data sets other than those may be used
    replaces_backbone: ClassVar[bool] = False  # whether its backbone replaces the data set's unasked
    methods: ClassVar[Mapping[str, Mapping[str, Stated]]] = {}  # method -> hyper-parameters on every data set
    tuned: ClassVar[
        Mapping[str, Mapping[str, Mapping[str, Stated]]]
    ] = {}  # data set -> method -> hyper-parameters
    notes: ClassVar[tuple[str, ...]] = ()  # readings, contradictions and what cannot be followed

    @classmethod
    def stated(cls, dataset: str) -> dict[str, Stated]:
        """Return the settings on a data set.

        Raises FczooError for an unknown data set, and for one that the paper does not use.
        """
        name = cls.resolve(dataset)
        if name not in cls.datasets and not cls.any_dataset:
            advice = nearest(name, list(cls.datasets))
            raise FczooError(f"protocol {cls.name} does not use {name}; {advice}")
        return {**cls.settings, **cls.datasets.get(name, {})}

    @classmethod
    def resolve(cls, dataset: str) -> str:
        """Return the registered name of a data set, or the name of one that only this source knows.

        Raises FczooError with the nearest names for any other.
        """
        known = {*cls.datasets, *cls.tuned}
        if dataset in known:
            return dataset
        return str(DATASETS.get(dataset).name)

    @classmethod
    def hyperparameters(cls, method: str, dataset: str) -> dict[str, Stated]:
        """Return what the protocol states for a method on a data set; empty where it says nothing.

        Raises FczooError for an unknown data set.
        """
        here = cls.tuned.get(cls.resolve(dataset), {})
        return {**cls.methods.get(method, {}), **here.get(method, {})}

    @classmethod
    def everything(cls) -> dict[tuple[str, str], list[Stated]]:
        """By owner (a method, or ``bench`` for settings) and field: all that is stated on any data set."""
        found: dict[tuple[str, str], list[Stated]] = {}
        every = [("bench", cls.settings), *(("bench", values) for values in cls.datasets.values())]
        every += cls.methods.items()
        every += [item for methods in cls.tuned.values() for item in methods.items()]
        for owner, values in every:
            for field, stated in values.items():
                found.setdefault((owner, field), []).append(stated)
        return found

    @classmethod
    def options(cls, method: str, dataset: str, beta: float | None) -> dict[str, Any]:
        """The same as plain values, those of a split's columns for ``beta``."""
        out = {}
        for field, stated in cls.hyperparameters(method, dataset).items():
            value = stated.value
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
    release: ClassVar[str] = ""  # what its released code does; empty where none is public
    partitions: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # data set -> all splits of the paper


class Release(Source):
    """What released code does, all options at once, rates and schedule with them (``--as-released``).

    It states a fact about code, not about a paper; a protocol of the paper may be followed beside it, and
    gives way to it.
    """

    repository: ClassVar[str]  # owner/name, and the commit that was read where it is known
    splits: ClassVar[Mapping[str, str]] = {}  # partitioner of the paper -> that of the code, where it differs
    any_dataset = True

    @classmethod
    def split(cls, spec: str) -> str:
        """A split of the paper as the code draws it."""
        name, colon, rest = spec.partition(":")
        return f"{cls.splits.get(name, name)}{colon}{rest}"


def same(source: str, *, open: bool = False, **values: Any) -> dict[str, Stated]:
    """Several values from one place."""
    return {name: Stated(value, source, open=open) for name, value in values.items()}
