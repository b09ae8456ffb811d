"""The papers' own tables: every number with its table, its protocol and what is known to be wrong with it."""

import csv
import io
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.options import nearest
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
    def metric_here(self) -> str | None:
        """The metric's name here; None for what is no accuracy of this program's tables."""
        if self.metric == f"acc@{200 if self.dataset == 'Tiny-ImageNet' else 100}classes":
            return "A_N"
        return METRICS.get(self.metric)


@dataclass(frozen=True)
class Paper:
    """One paper: its printed rows, and what is known of them.

    How it ran its experiments says the protocol of the same name.
    """

    key: str
    name: str
    citation: str
    open: list[str]  # what the paper leaves open, so that no run can be known to follow it
    methods: dict[str, list[Any]]  # printed name -> method here, options of that reading
    caveats: dict[str, list[str]]  # table, or "" for all

    @property
    def protocol(self) -> type[Protocol]:
        found: type[Protocol] = PROTOCOLS.get(self.key)
        return found

    @property
    def numbers(self) -> list[Number]:
        return [n for n in _numbers() if n.paper == self.name]

    def method_here(self, number: Number) -> tuple[str | None, dict[str, Any]]:
        """Name and options of a printed row's method; no name where this program has none."""
        name, *options = self.methods.get(number.method, [None])
        return name, options[0] if options else {}

    def settings(self, number: Number) -> Settings:
        """The settings behind a number, by the paper's protocol.

        Raises FczooError where it has no such data set or split.
        """
        dataset = DATASETS.get(number.dataset, number.dataset)
        usual = Settings.for_dataset(dataset, protocol=self.key)
        splits = [
            p
            for p in (usual.partition, *self.protocol.partitions.get(dataset, ()))
            if plain_split(p) == number.spec
        ]
        if not splits:
            raise FczooError(f"{self.name}'s protocol has no split {number.partition!r} of {dataset}")
        tasks = None if number.tasks == usual.task_count else number.tasks
        return Settings.for_dataset(dataset, protocol=self.key, partition=splits[0], tasks=tasks)


def plain_split(spec: str) -> str:
    """``dirichlet:1.0,draw=sample`` -> ``dirichlet:1``: what papers print of a split."""
    name, _, value = spec.partition(",")[0].partition(":")
    value = value.partition("=")[2] or value
    return f"{name}:{float(value):g}" if value.replace(".", "", 1).isdecimal() else spec


@cache
def _numbers() -> tuple[Number, ...]:
    rows = csv.DictReader(io.StringIO((files("fczoo.assets") / "paper_tables.csv").read_text()))
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
    content = json.loads((files("fczoo.assets") / "papers.json").read_text())
    return {key: Paper(key, **about) for key, about in content.items()}


def get_paper(key: str) -> Paper:
    """Raises FczooError with the nearest keys for an unknown one."""
    if key.lower() not in papers():
        raise FczooError(f"no paper is called {key!r}; {nearest(key.lower(), list(papers()))}")
    return papers()[key.lower()]


def overview() -> str:
    """Papers and their tables, with how many numbers each holds."""
    rows = []
    for paper in papers().values():
        for table in dict.fromkeys(n.table for n in paper.numbers):
            numbers = [n for n in paper.numbers if n.table == table]
            what = [
                ", ".join(dict.fromkeys(values))
                for values in ([n.dataset for n in numbers], [n.metric for n in numbers])
            ]
            metrics = (
                what[1] if len(what[1]) < 60 else f"{what[1].split(', ')[0]} ... {what[1].split(', ')[-1]}"
            )
            rows.append((paper.key, table, len(numbers), what[0], metrics))
    cited = "\n".join(f"{p.key}: {p.citation}" for p in papers().values())
    table = tabulate(rows, ["paper", "table", "numbers", "data sets", "metrics"])
    return f"{cited}\n\n{table}\n\nfczoo papers PAPER TABLE prints one."


def show_paper(key: str, table: str | None) -> str:
    """One table of a paper, or all of them, as printed, with the protocol and the caveats.

    Raises FczooError for an unknown table.
    """
    paper = get_paper(key)
    tables = list(dict.fromkeys(n.table for n in paper.numbers))
    if table is not None and table.lower() not in [t.lower() for t in tables]:
        raise FczooError(f"{paper.key} has no table {table!r}; it has {', '.join(tables)}")
    wanted = [t for t in tables if table is None or t.lower() == table.lower()]
    left_open = [f"Left open: {'; '.join(paper.open)}"] if paper.open else []
    parts = [
        f"{paper.name}: {paper.citation}\nIts settings: fczoo show protocol {paper.key} --dataset NAME",
        *left_open,
        *_caveats(paper, ""),
    ]
    for t in wanted:
        numbers = [n for n in paper.numbers if n.table == t]
        for dataset, tasks in dict.fromkeys((n.dataset, n.tasks) for n in numbers):
            here = [n for n in numbers if (n.dataset, n.tasks) == (dataset, tasks)]
            parts.append(f"{t}: {dataset}, {tasks} tasks\n{_grid(here)}")
        parts += _caveats(paper, t)
    return "\n\n".join(parts)


def _caveats(paper: Paper, table: str) -> list[str]:
    lines = [f"- {c}" for c in paper.caveats.get(table, [])]
    return [f"{f'On {table}' if table else 'To know'}:\n" + "\n".join(lines)] if lines else []


def _grid(numbers: list[Number]) -> str:
    columns = list(dict.fromkeys((n.partition, n.metric) for n in numbers))
    known = {
        (n.method, n.partition, n.metric): f"{n.value:g}" + (f" ± {n.std:g}" if n.std is not None else "")
        for n in numbers
    }
    body = [[m, *(known.get((m, *c), "") for c in columns)] for m in dict.fromkeys(n.method for n in numbers)]
    several = len({p for p, _ in columns}) > 1
    head = [f"{m}\n{p}" if several or i == 0 else m for i, (p, m) in enumerate(columns)]
    return tabulate(
        body, ["method", *head], disable_numparse=True, colalign=("left", *["right"] * len(columns))
    )
