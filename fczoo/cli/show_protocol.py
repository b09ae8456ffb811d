"""What ``fczoo show protocol NAME`` prints."""

import inspect
import textwrap
from dataclasses import fields
from typing import Any

from fczoo.core.registry import DATASETS, METHODS, PROTOCOLS
from fczoo.federation.settings import Settings
from fczoo.papers.protocol import ByBeta, Protocol, Stated
from fczoo.reports.words import option_word, word_table

DEFAULTS = {f.name: f.default for f in fields(Settings)}


def protocol_page(name: str, dataset: str | None) -> str:
    """Everything that a protocol states on a data set, each value with its source;
    without one, an overview.
    """
    cls = PROTOCOLS.get(name)
    parts = [f"{cls.name}: {inspect.getdoc(cls)}", f"Paper: {cls.paper}"]
    parts += [_overview(cls)] if dataset is None else _on(cls, dataset)
    notes = [textwrap.fill(note, 120, initial_indent="- ", subsequent_indent="  ") for note in cls.notes]
    return "\n\n".join([*parts, "\n".join(["Notes:", *notes])])


def _overview(cls: type[Protocol]) -> str:
    shown = ("tasks", "rounds", "epochs", "batch_size", "clients", "partition")
    rows = [(d, *(option_word(_values(cls, d).get(field, "")) for field in shown)) for d in cls.datasets]
    more = " Other data sets may be used, too." if cls.any_dataset else ""
    head = ["data set", *(f.replace("_", " ") for f in shown)]
    source = f"Everything with its source: fczoo show protocol {cls.name} --dataset NAME.{more}"
    return f"{word_table(rows, head)}\n\n{source}"


def _values(cls: type[Protocol], dataset: str) -> dict[str, Any]:
    stated = cls.stated(dataset)
    tasks: Any = stated["tasks"].value
    return {k: v.given(tasks if isinstance(tasks, int) else len(tasks)) for k, v in stated.items()}


def _on(cls: type[Protocol], dataset: str) -> list[str]:
    stated, values = cls.stated(dataset), _values(cls, dataset)
    rows = [(field, _stated(values[field]), stated[field].source) for field in DEFAULTS if field in stated]
    rows.append(("seeds", option_word(cls.seeds.value), cls.seeds.source))
    missing = (
        ""
        if dataset in DATASETS.names()
        else f" No data set of that name is installed; known: {', '.join(DATASETS.names())}."
    )
    parts = [
        f"On {dataset} (fczoo bench --protocol {cls.name} --dataset "
        f"{dataset}):{missing}\n{word_table(rows, ['setting', 'value', 'source'])}"
    ]
    if dataset in cls.partitions:
        parts.append(f"Its splits (--partition): {'  '.join(cls.partitions[dataset])}")
    names = sorted({*cls.methods, *cls.tuned.get(dataset, {})})
    options = [
        (
            name if name in METHODS.names() else f"{name} (not installed)",
            field,
            _stated(value.value),
            _source(value),
        )
        for name in names
        for field, value in cls.hyperparameters(name, dataset).items()
    ]
    if options:
        parts.append(
            "Hyper-parameters; other options keep the method's own "
            f"values:\n{word_table(options, ['method', 'option', 'value', 'source'])}"
        )
    return parts


def _stated(value: Any) -> str:
    return (
        " | ".join(map(option_word, value.values.values()))
        if isinstance(value, ByBeta)
        else option_word(value)
    )


def _source(stated: Stated) -> str:
    if not isinstance(stated.value, ByBeta):
        return stated.source
    return f"{stated.source}, at beta {' | '.join(map(option_word, stated.value.values))}"
