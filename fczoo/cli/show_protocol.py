"""Output of ``fczoo show protocol NAME`` and ``fczoo show release NAME``."""

import inspect
import textwrap
from dataclasses import fields
from typing import Any

from fczoo.core.registry import DATASETS, METHODS
from fczoo.data.dataset import domains_of
from fczoo.federation.settings import Settings
from fczoo.papers.protocol import ByBeta, Protocol, Release, Source, Statement
from fczoo.reports.text_format import option_word, word_table

DEFAULTS = {f.name: f.default for f in fields(Settings)}


PRINT = (
    "In print: what the paper prints where the value follows something else; open: the paper does "
    "not say."
)


def source_page(cls: type[Source], dataset: str | None) -> str:
    """Describe a protocol or release on a data set, each value with its source.

    Args:
        cls: Class of the protocol or release.
        dataset: Name of the data set. None: an overview of all.

    Returns:
        The text to print.
    """
    parts = [f"{cls.name}: {inspect.getdoc(cls)}", _origin(cls)]
    parts += [_overview(cls)] if dataset is None else _on(cls, dataset)
    notes = [
        textwrap.fill(note, 120, initial_indent="- ", subsequent_indent="  ") for note in cls.notes
    ]
    return "\n\n".join([*parts, *(["\n".join(["Notes:", *notes])] if notes else [])])


def _origin(cls: type[Source]) -> str:
    if issubclass(cls, Release):
        return f"Repository: {cls.repository}"
    return f"Paper: {cls.paper}" if issubclass(cls, Protocol) else ""


def _kind(cls: type[Source]) -> tuple[str, str]:
    """Return the command's noun and option: argument of ``fczoo show`` and option of ``fczoo
    bench``.
    """
    return ("protocol", "--protocol") if issubclass(cls, Protocol) else ("release", "--as-released")


def _overview(cls: type[Source]) -> str:
    field_names = ("tasks", "rounds", "epochs", "batch_size", "clients", "partition")
    rows = [
        (d, *(option_word(_values(cls, d).get(field, "")) for field in field_names))
        for d in cls.datasets
    ]
    dataset_note = " Other data sets may be used, too." if cls.any_dataset else ""
    head = ["data set", *(f.replace("_", " ") for f in field_names)]
    source = (
        f"Everything with its source: fczoo show {_kind(cls)[0]} {cls.name} --dataset NAME."
        f"{dataset_note}"
    )
    return f"{word_table(rows, head)}\n\n{source}"


def _values(cls: type[Source], dataset: str) -> dict[str, Any]:
    stated_values = cls.settings_on(dataset)
    tasks: Any = stated_values["tasks"].value if "tasks" in stated_values else DEFAULTS["tasks"]
    if tasks == "domains":
        tasks = domains_of(dataset)
    return {
        k: v.value_for(tasks if isinstance(tasks, int) else len(tasks))
        for k, v in stated_values.items()
    }


def _on(cls: type[Source], dataset: str) -> list[str]:
    dataset = cls.resolve(dataset)
    stated_values, values = cls.settings_on(dataset), _values(cls, dataset)
    all_values = [stated_values[field] for field in DEFAULTS if field in stated_values]
    rows = [
        (
            field,
            option_word(values[field]),
            stated_values[field].print_word,
            stated_values[field].source,
        )
        for field in DEFAULTS
        if field in stated_values
    ]
    rows.append(("seeds", option_word(cls.seeds.value), cls.seeds.print_word, cls.seeds.source))
    missing = (
        ""
        if dataset in DATASETS.names()
        else f" No data set of that name is installed; known: {', '.join(DATASETS.names())}."
    )
    parts = [
        f"On {dataset} (fczoo bench {_kind(cls)[1]} {cls.name} --dataset "
        f"{dataset}):{missing}\n{word_table(rows, ['setting', 'value', 'in print', 'source'])}"
    ]
    if issubclass(cls, Protocol) and dataset in cls.partitions:
        parts.append(f"Its splits (--partition): {'  '.join(cls.partitions[dataset])}")
    names = sorted({*METHODS.names(), *cls.methods, *cls.dataset_options.get(dataset, {})})
    options = [
        (
            name if name in METHODS.names() else f"{name} (not installed)",
            field,
            value.text,
            value.print_word,
            _source(value),
        )
        for name in names
        for field, value in cls.hyperparameters(name, dataset).items()
    ]
    if options:
        head = ["method", "option", "value", "in print", "source"]
        parts.append(
            "Hyper-parameters; other options keep the method's own "
            f"values:\n{word_table(options, head)}"
        )
    all_values += [v for name in names for v in cls.hyperparameters(name, dataset).values()]
    return [*parts, *([PRINT] if any(s.print_word for s in all_values) else [])]


def _source(stated: Statement) -> str:
    if not isinstance(stated.value, ByBeta):
        return stated.source
    return f"{stated.source}, at beta {' | '.join(map(option_word, stated.value.values))}"
