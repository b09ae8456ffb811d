"""Output of ``fczoo show protocol NAME`` and ``fczoo show release NAME``."""

import textwrap
from dataclasses import fields
from typing import Any

from fczoo.core.registry import DATASETS, METHODS
from fczoo.data.dataset import domains_of
from fczoo.federation.settings import Settings
from fczoo.protocols.source import ByBeta, Source, Statement
from fczoo.reports.text_format import option_word, word_table

DEFAULTS = {f.name: f.default for f in fields(Settings)}
WIDTH = 120  # columns of running text

PRINT = (
    "In print: what the paper prints where the value follows something else; open: the paper does "
    "not say."
)


def source_page(source: Source, dataset: str | None) -> str:
    """Describe a protocol or release on a data set, each value with its source.

    Args:
        source: Protocol or release.
        dataset: Name of the data set. None: an overview of all.

    Returns:
        The text to print.
    """
    paragraphs = f"{source.name}: {source.about}".split("\n\n")
    parts = [textwrap.fill(paragraph, WIDTH) for paragraph in paragraphs]
    parts.append(
        f"Paper: {source.paper}"
        if source.kind == "protocol"
        else f"Repository: {source.repository}"
    )
    parts += [_overview(source)] if dataset is None else _on(source, dataset)
    notes = [
        textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        for note in source.notes
    ]
    return "\n\n".join([*parts, *(["\n".join(["Notes:", *notes])] if notes else [])])


def value_words(statement: Statement) -> str:
    """Format the value of a statement, or the values of several betas side by side.

    Args:
        statement: Statement of a protocol or release.
    """
    if statement.depends_on_tasks:
        return "by the number of tasks"
    return " | ".join(map(option_word, statement.columns))


def _print_word(statement: Statement) -> str:
    """Describe the deviation from the print; empty if there is none."""
    if statement.open:
        return "open"
    return "" if statement.printed is ... else option_word(statement.printed)


def _command_words(source: Source) -> str:
    """Return the option of ``fczoo bench`` with the name of a protocol or release."""
    flags = {"protocol": "--protocol", "release": "--as-released"}
    return f"{flags[source.kind]} {source.name}"


def _overview(source: Source) -> str:
    field_names = ("tasks", "rounds", "epochs", "batch_size", "clients", "partition")
    rows = [
        (d, *(option_word(_values(source, d).get(field, "")) for field in field_names))
        for d in source.datasets
    ]
    dataset_note = " Other data sets may be used, too." if source.any_dataset else ""
    head = ["data set", *(f.replace("_", " ") for f in field_names)]
    hint = (
        f"Everything with its source: fczoo show {source.kind} {source.name} --dataset NAME."
        f"{dataset_note}"
    )
    return f"{word_table(rows, head)}\n\n{hint}"


def _values(source: Source, dataset: str) -> dict[str, Any]:
    stated_values = source.settings_on(dataset)
    tasks: Any = stated_values["tasks"].value if "tasks" in stated_values else DEFAULTS["tasks"]
    if tasks == "domains":
        tasks = domains_of(dataset)
    return {
        k: v.value_for(tasks if isinstance(tasks, int) else len(tasks))
        for k, v in stated_values.items()
    }


def _on(source: Source, dataset: str) -> list[str]:
    dataset = source.resolve(dataset)
    stated_values, values = source.settings_on(dataset), _values(source, dataset)
    all_values = [stated_values[field] for field in DEFAULTS if field in stated_values]
    rows = [
        (
            field,
            option_word(values[field]),
            _print_word(stated_values[field]),
            stated_values[field].source,
        )
        for field in DEFAULTS
        if field in stated_values
    ]
    rows.append(
        ("seeds", option_word(source.seeds.value), _print_word(source.seeds), source.seeds.source)
    )
    missing = (
        ""
        if dataset in DATASETS.names()
        else f" No data set of that name is installed; known: {', '.join(DATASETS.names())}."
    )
    parts = [
        f"On {dataset} (fczoo bench {_command_words(source)} --dataset "
        f"{dataset}):{missing}\n{word_table(rows, ['setting', 'value', 'in print', 'source'])}"
    ]
    if dataset in source.partitions:
        parts.append(f"Its splits (--partition): {'  '.join(source.partitions[dataset])}")
    names = sorted({*METHODS.names(), *source.methods, *source.dataset_options.get(dataset, {})})
    options = [
        (
            name if name in METHODS.names() else f"{name} (not installed)",
            field,
            value_words(value),
            _print_word(value),
            _source(value),
        )
        for name in names
        for field, value in source.hyperparameters(name, dataset).items()
    ]
    if options:
        head = ["method", "option", "value", "in print", "source"]
        parts.append(
            "Hyper-parameters; other options keep the method's own "
            f"values:\n{word_table(options, head)}"
        )
    all_values += [v for name in names for v in source.hyperparameters(name, dataset).values()]
    return [*parts, *([PRINT] if any(map(_print_word, all_values)) else [])]


def _source(stated: Statement) -> str:
    if not isinstance(stated.value, ByBeta):
        return stated.source
    return f"{stated.source}, at beta {' | '.join(map(option_word, stated.value.values))}"
