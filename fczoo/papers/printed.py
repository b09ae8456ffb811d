"""The papers' own tables: every number with its table, its protocol and what is known to be wrong with it."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.options import nearest, quoted
from fczoo.core.registry import PROTOCOLS
from fczoo.federation.settings import Settings
from fczoo.papers.protocol import Protocol

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
COSTS = {"COMM_params_per_round": "MB up"}
"""What a client sends in a round: the papers count parameters, fczoo bytes."""


@dataclass(frozen=True)
class Number:
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
        """The partition as ``--partition`` takes it; as printed where it names none."""
        name, sign, value = self.partition.partition("=")
        known = {"beta": "dirichlet", "alpha": "quantity", "IID": "iid", "GLFC-60%": "overlap:0.6"}
        if not sign:
            return known.get(name, name)
        return (
            f"{known[name]}:{float(value):g}"
            if name in known and value.replace(".", "").isdecimal()
            else self.partition
        )

    @property
    def classes(self) -> int | None:
        """Classes seen at an accuracy in the middle of a run; None for other figures."""
        found = re.fullmatch(r"acc@(\d+)classes", self.metric)
        return int(found[1]) if found else None

    @property
    def metric_here(self) -> str | None:
        """The figure's name here; None for what is no accuracy."""
        return self.metric if self.classes is not None else METRICS.get(self.metric)

    @property
    def cost_here(self) -> str | None:
        """The same of a cost, in another unit here; None for what is none."""
        return COSTS.get(self.metric)


@dataclass(frozen=True)
class Row:
    """What a printed number was measured on and with, in this program's names."""

    dataset: str
    split: str | None  # None: the same for every split
    method: str | None  # None: printed words that mean nothing here
    options: Mapping[str, Any]
    settings: Mapping[str, Any]  # in which it differs from the paper's other rows
    card: str  # the last part of its card's name; empty for the paper's own method
    why: str  # why no run can follow it; empty where one can


@dataclass(frozen=True)
class Paper:
    """One paper: its printed rows, and what is known of them.

    How it ran its experiments says the protocol of the same name.
    """

    key: str
    name: str
    citation: str
    spread: str  # what its standard deviations are
    population: bool  # whether they divide by the number of runs, not by one less
    methods: dict[str, dict[str, Any]]  # printed name -> method here, and what its row has other than usual
    conditions: dict[str, dict[str, Any]]  # printed data set or split -> the same, where it says more
    caveats: dict[str, list[str]]  # table, or "" for all

    @property
    def protocol(self) -> type[Protocol]:
        found: type[Protocol] = PROTOCOLS.get(self.key)
        return found

    @property
    def release(self) -> str:
        """Name of what its released code does; empty where none is public."""
        return self.protocol.release

    @property
    def numbers(self) -> list[Number]:
        return [n for n in _numbers() if n.paper == self.name]

    def row(self, number: Number) -> Row:
        """What a number was measured on and with."""
        where = {**self.conditions.get(number.dataset, {}), **self.conditions.get(number.partition, {})}
        about = self.methods.get(number.method, {})
        method: str | None = about.get("method")
        usual = "" if method == self.key else method or ""
        return Row(
            where.get("dataset", DATASETS.get(number.dataset, number.dataset)),
            where.get("split", number.spec),
            method,
            {**where.get("tuned", {}).get(method, {}), **about.get("options", {})},
            {**where.get("settings", {}), **about.get("settings", {})},
            "/".join(filter(None, [where.get("card", ""), about.get("card", usual)])),
            about.get("why", ""),
        )

    def settings(self, number: Number, **changes: Any) -> Settings:
        """The settings behind a number, by the paper's protocol and ``changes`` of it.

        Raises FczooError where it has no such data set or split.
        """
        row = self.row(number)
        usual = Settings.for_dataset(row.dataset, protocol=self.key)
        splits = [
            p
            for p in (usual.partition, *self.protocol.partitions.get(row.dataset, ()))
            if row.split in (None, plain_split(p))
        ]
        if not splits:
            raise FczooError(f"{self.name}'s protocol has no split {number.partition!r} of {row.dataset}")
        tasks = None if number.tasks == usual.task_count else number.tasks
        given = {"partition": splits[0], "tasks": tasks, **changes, **row.settings}
        return Settings.for_dataset(row.dataset, protocol=self.key, **given)

    def sample_std(self, number: Number) -> float | None:
        """A printed standard deviation, as it would be with one run less in the denominator."""
        runs = len(self.protocol.seeds.given(number.tasks))
        if number.std is None or not self.population or runs < 2:
            return number.std
        return number.std * math.sqrt(runs / (runs - 1))


def choose_numbers(
    numbers: Sequence[Number], tables: Sequence[str] = (), rows: Sequence[str] = ()
) -> list[Number]:
    """Keep the numbers of the named tables and rows; no name keeps all.

    Case does not matter. A row may be given by a part of its printed name.
    Raises FczooError for an unknown name, with the known ones.
    """
    found = list(numbers)
    if tables:
        known = dict.fromkeys(n.table for n in found)
        wanted = {table for name in tables for table in _named("table", name, list(known), parts=False)}
        found = [n for n in found if n.table in wanted]
    if rows:
        known = dict.fromkeys(n.method for n in found)
        wanted = {row for name in rows for row in _named("row", name, list(known), parts=True)}
        found = [n for n in found if n.method in wanted]
    return found


def _named(kind: str, name: str, known: Sequence[str], parts: bool) -> list[str]:
    word = name.strip().casefold()
    found = [k for k in known if k.casefold() == word]
    if not found and parts and word:
        found = [k for k in known if word in k.casefold()]
    if not found:
        raise FczooError(f"no {kind} is called {quoted(name)}; known: {', '.join(known)}")
    return found


def plain_split(spec: str) -> str:
    """``dirichlet:1.0,draw=sample`` -> ``dirichlet:1``: what papers print of a split."""
    name, _, value = spec.partition(",")[0].partition(":")
    value = value.partition("=")[2] or value
    return f"{name}:{float(value):g}" if value.replace(".", "", 1).isdecimal() else spec


@cache
def _numbers() -> tuple[Number, ...]:
    table = files("fczoo.assets") / "paper_tables.csv"
    rows = csv.DictReader(io.StringIO(table.read_text(encoding="utf-8")))
    return tuple(
        Number(
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
    """All papers by key."""
    content = json.loads((files("fczoo.assets") / "papers.json").read_text(encoding="utf-8"))
    return {key: Paper(key, **about) for key, about in content.items()}


def get_paper(key: str) -> Paper:
    """Return the paper of a key. Raises FczooError with the nearest keys for an unknown one."""
    spelled = match(key, papers())
    if spelled is None:
        raise FczooError(f"no paper is called {key!r}; {nearest(key, papers())}")
    return papers()[spelled]
