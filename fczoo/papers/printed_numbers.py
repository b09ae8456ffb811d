"""Tables of papers: every printed number with its table, conditions and caveats."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import read_toml
from fczoo.core.names import match
from fczoo.core.options import nearest, quote
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.stated_values import Source

DATASETS = {
    "CIFAR-100": "cifar100",
    "TinyImageNet": "tinyimagenet",
    "Tiny-ImageNet": "tinyimagenet",
    "Mini-ImageNet": "miniimagenet",
    "ImageNet-R": "imagenet_r",
    "ImageNet-A": "imagenet_a",
    "EuroSAT": "eurosat",
    "Cars-196": "cars196",
    "CUB-200": "cub200",
}
METRICS = {
    "A_N": "A_N",
    "Avg": "Avg",
    "F_N": "forgetting",
    "FAA": "FAA",
    "Abar": "Abar",
    "A_T": "FAA",
    "Fbar": "forgetting",
}
PAPER_METRICS = {("FCILPT", "Avg"): "Abar"}
"""Metrics with another definition in one paper: FCILPT averages over tasks, not over images."""
COSTS = {"COMM_params_per_round": "MB up", "COMM": "MB up", "PARAM": "trained"}
"""Our columns by printed cost; papers count parameters of an upload, fczoo bytes."""

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class PrintedNumber:
    """One printed number."""

    paper: str
    table: str
    dataset: str
    tasks: int
    partition: str
    method: str
    metric: str
    value: float
    std: float | None

    @property
    def spec(self) -> str:
        """Return the partition in the form of ``--partition``; if there is none, as printed."""
        name, sign, value = self.partition.partition("=")
        partitioners = {
            "beta": "dirichlet",
            "alpha": "quantity",
            "IID": "iid",
            "GLFC-60%": "overlap:0.6",
        }
        if not sign:
            return partitioners.get(name, name)
        return (
            f"{partitioners[name]}:{float(value):g}"
            if name in partitioners and value.replace(".", "").isdecimal()
            else self.partition
        )

    @property
    def classes(self) -> int | None:
        """Return the classes seen, for an accuracy within a run; None for other metrics."""
        metric_match = re.fullmatch(r"acc@(\d+)classes", self.metric)
        return int(metric_match[1]) if metric_match else None

    @property
    def our_metric(self) -> str | None:
        """Return our name of the metric; None if it is not an accuracy."""
        if self.classes is not None:
            return self.metric
        return PAPER_METRICS.get((self.paper, self.metric)) or METRICS.get(self.metric)

    @property
    def our_cost(self) -> str | None:
        """Return our name of a cost, in another unit; None if it is not a cost."""
        return COSTS.get(self.metric)


@dataclass(frozen=True)
class PrintedRow:
    """Conditions of a printed number, in fczoo's names."""

    dataset: str
    split: str | None  # None: the same for every split
    method: str | None  # None: not a method of fczoo
    options: Mapping[str, Any]
    settings: Mapping[str, Any]  # only those that differ from the paper's other rows
    card: str  # last part of its card's name; empty for the paper's own method
    why: str  # reason why no run can follow it; empty if one can


class PrintedMethod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Method of a printed name, with the unusual conditions of its rows."""

    method: str | None = None  # None: not a method of fczoo
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    card: str | None = None  # None: the method, unless it is the paper's own
    why: str = ""  # reason why no run can follow it


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions of a printed data set or split, in fczoo's names."""

    dataset: str = ""
    split: str = ""
    any_split: bool = False  # whether the number is the same for every split
    settings: dict[str, Any] = {}
    tuned: dict[str, dict[str, Any]] = {}  # options by method
    card: str = ""


class PrintedCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Definition of a printed count of numbers."""

    # upload of a round, trained tensors, or the server's state at the start of the last task
    of: Literal["round", "trained", "state"]
    head: bool = True  # whether the classifier counts
    tensors: dict[str, list[str]] = {}  # prefixes that count by method; others: all tensors


NO_CONDITIONS = Conditions()


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One paper: its printed rows and their conditions.

    The protocol of the same name describes its experiments.
    """

    key: str = ""  # name of its table in the file
    name: str
    citation: str
    spread: str  # meaning of its standard deviations
    population: bool = False  # whether they divide by n runs instead of n - 1
    methods: dict[str, PrintedMethod]  # methods by printed name
    conditions: dict[str, Conditions] = {}  # conditions by printed data set or split
    costs: dict[str, PrintedCost] = {}  # definitions by printed name
    caveats: dict[str, list[str]]  # caveats by table; "": of all tables

    @property
    def protocol(self) -> Source:
        return PROTOCOLS.get(self.key)

    @property
    def release(self) -> str:
        """Return the name of its release; empty if no code is public."""
        return self.protocol.release

    @property
    def numbers(self) -> list[PrintedNumber]:
        return [n for n in _numbers() if n.paper == self.name]

    def row(self, number: PrintedNumber) -> PrintedRow:
        """Return the conditions of a number.

        Args:
            number: Number of this paper.
        """
        conditions = [
            self.conditions.get(word, NO_CONDITIONS) for word in (number.partition, number.dataset)
        ]
        dataset, split, card = (
            next(filter(None, values), "")
            for values in zip(*((c.dataset, c.split, c.card) for c in conditions), strict=True)
        )
        printed_method = self.methods.get(number.method, PrintedMethod())
        card_method = "" if printed_method.method == self.key else printed_method.method or ""
        options, settings = {**printed_method.options}, {**printed_method.settings}
        for condition in conditions:
            options = {**condition.tuned.get(printed_method.method or "", {}), **options}
            settings = {**condition.settings, **settings}
        return PrintedRow(
            dataset or DATASETS.get(number.dataset, number.dataset),
            None if any(c.any_split for c in conditions) else split or number.spec,
            printed_method.method,
            options,
            settings,
            "/".join(
                filter(
                    None,
                    [card, card_method if printed_method.card is None else printed_method.card],
                )
            ),
            printed_method.why,
        )

    def settings(self, number: PrintedNumber, **changes: Any) -> Settings:
        """Return the settings of a number, from the paper's protocol and ``changes``.

        Args:
            number: Number of this paper.
            **changes: Fields of ``Settings``; conditions of the number's row override them.

        Raises:
            FczooError: The protocol has no such data set or split.
        """
        row = self.row(number)
        defaults = Settings.for_dataset(row.dataset, protocol=self.key)
        splits = [
            p
            for p in (defaults.partition, *self.protocol.partitions.get(row.dataset, ()))
            if row.split in (None, plain_split(p))
        ]
        if not splits:
            raise FczooError(
                f"{self.name}'s protocol has no partition {number.partition!r} of {row.dataset}"
            )
        tasks = None if number.tasks == defaults.task_count else number.tasks
        values = {"partition": splits[0], "tasks": tasks, **changes, **row.settings}
        return Settings.for_dataset(row.dataset, protocol=self.key, **values)

    def sample_std(self, number: PrintedNumber) -> float | None:
        """Convert a printed standard deviation to one with n - 1 in the denominator.

        Args:
            number: Number of this paper.

        Returns:
            Standard deviation in points; None if none is printed.
        """
        runs = len(self.protocol.seeds.value_for(number.tasks))
        if number.std is None or not self.population or runs < 2:
            return number.std
        return number.std * math.sqrt(runs / (runs - 1))


class PaperWithoutTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paper of a method in fczoo without a table in fczoo."""

    citation: str
    why: str


def choose_numbers(
    numbers: Sequence[PrintedNumber], tables: Sequence[str] = (), rows: Sequence[str] = ()
) -> list[PrintedNumber]:
    """Choose the numbers of some tables and rows; without names, all numbers.

    Args:
        numbers: Numbers to choose from.
        tables: Names of tables; case does not matter.
        rows: Printed names of rows, or parts of them; case does not matter.

    Raises:
        FczooError: A name is unknown; the message gives the known ones.
    """
    selection = list(numbers)
    if tables:
        chosen_tables = _match_names("table", tables, [n.table for n in selection], parts=False)
        selection = [n for n in selection if n.table in chosen_tables]
    if rows:
        chosen_rows = _match_names("row", rows, [n.method for n in selection], parts=True)
        selection = [n for n in selection if n.method in chosen_rows]
    return selection


def _match_names(kind: str, names: Sequence[str], printed: Iterable[str], parts: bool) -> set[str]:
    """Return the printed names that equal one of ``names``; with ``parts``, or contain it."""
    known, chosen_names = list(dict.fromkeys(printed)), set[str]()
    for name in names:
        folded_name = name.strip().casefold()
        matches = [k for k in known if k.casefold() == folded_name]
        if not matches and parts and folded_name:
            matches = [k for k in known if folded_name in k.casefold()]
        if not matches:
            raise FczooError(f"no {kind} is called {quote(name)}; known: {', '.join(known)}")
        chosen_names.update(matches)
    return chosen_names


def plain_split(spec: str) -> str:
    """Convert ``dirichlet:1.0,draw=sample`` to ``dirichlet:1``, as papers print it.

    Args:
        spec: Partition in the form of ``--partition``.
    """
    name, _, value = spec.partition(",")[0].partition(":")
    value = value.partition("=")[2] or value
    return f"{name}:{float(value):g}" if value.replace(".", "", 1).isdecimal() else spec


@cache
def _numbers() -> tuple[PrintedNumber, ...]:
    table = files("fczoo.assets") / "paper_tables.csv"
    rows = csv.DictReader(io.StringIO(table.read_text(encoding="utf-8")))
    return tuple(
        PrintedNumber(
            r["paper"],
            r["table"],
            r["dataset"],
            int(r["tasks"]),
            r["partition"],
            r["method"],
            r["metric"],
            float(r["value"]),
            float(r["std"]) if r["std"] else None,
        )
        for r in rows
    )


@cache
def papers() -> dict[str, Paper]:
    """Return all papers by key."""
    path = files("fczoo.assets") / "papers.toml"
    content = read_toml(path, "list of papers", dict[str, Paper])
    return {key: msgspec.structs.replace(paper, key=key) for key, paper in content.items()}


@cache
def papers_without_table() -> dict[str, PaperWithoutTable]:
    """Return the papers without a table in fczoo, by method."""
    path = files("fczoo.assets") / "papers_left_out.toml"
    return read_toml(path, "list of papers", dict[str, PaperWithoutTable])


def get_paper(key: str) -> Paper:
    """Return the paper of a key.

    Args:
        key: Key in any spelling that ``match`` accepts.

    Raises:
        FczooError: The key is unknown; the message gives the nearest keys.
    """
    return find_named("paper", key, papers())


def find_named(kind: str, word: str, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry that a word names.

    Args:
        kind: Kind of the entries, for the message.
        word: Name in any spelling that ``match`` accepts.
        entries: Entries by name.

    Raises:
        FczooError: No entry has this name; the message gives the nearest names.
    """
    name = match(word, entries)
    if name is None:
        raise FczooError(f"no {kind} is called {word!r}; {nearest(word, entries)}")
    return entries[name]
