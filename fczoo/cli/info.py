"""Commands ``fczoo list``, ``show`` and ``doctor``: lists of names, and pages about them.

``show`` finds the meanings of a name. Pages of parts and backbones are in ``fczoo.cli.show``, which
imports torch; pages of protocols, releases, settings and options are in this module.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from fczoo.backbones.names import BUNDLED_NAME, canonical_backbone, names_containing, spellings
from fczoo.cli.listing import (
    KINDS,
    PART_KINDS,
    PARTS,
    SOURCES,
    complete_names,
    list_kinds,
    listing,
    value_words,
)
from fczoo.cli.options import DATA_FOLDER, GroupedCommand, Name
from fczoo.cli.other_tools import option_owners, option_pointer
from fczoo.core.errors import FczooError
from fczoo.core.names import fold, join_first_names, match
from fczoo.core.options import flag, nearest, plural
from fczoo.core.registry import DATASETS, METHODS
from fczoo.data.dataset import domains_of
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import REGISTRY_OF_SETTING
from fczoo.protocols.stated_values import Source, Statement, ValuesByBeta
from fczoo.reports.text_format import nearest_or_advice, option_word, plain_table, word_table

OTHER_LISTS = {
    "papers": "fczoo papers",
    "claims": "fczoo claims",
    "cards": "fczoo reproduce",
    "suites": "fczoo suite status NAME",
    "settings": "fczoo show settings",
    "results": "fczoo report results",
}
"""Command that lists the names, for words that are not kinds."""


class NameKind(Name):
    """Type of a kind of names; errors point to the command that lists another word's names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        other = match(str(value), OTHER_LISTS)
        if other and not match(str(value), self.choices):
            self.fail(f"{value!r} is not a KIND; see `{OTHER_LISTS[other]}`", param, ctx)
        return super().convert(value, param, ctx)


@click.command("list", cls=GroupedCommand)
@click.argument("kind", required=False, metavar="[KIND]", type=NameKind(list(KINDS)))
def list_command(kind: str | None) -> None:
    """List the names of one kind; without KIND, list the kinds."""
    click.echo(listing(kind) if kind else list_kinds())


@click.command(cls=GroupedCommand)
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="[KIND] NAME",
    shell_complete=complete_names,
)
@click.option(
    "--dataset",
    metavar="NAME",
    help="Show the values of settings and options on this data set  [default: digits; for a "
    "protocol or release, all data sets]",
)
def show(names: tuple[str, ...], dataset: str | None) -> None:
    """Show a method, data set, partitioner, aggregator, attack, local rule, protocol, release,
    backbone, setting or option. `show settings` has all settings of a run, `show result` the fields
    of its result.

    KIND selects one of several entries with the same name, such as `show aggregator fedavg` or
    `show protocol hgp`. `show backbone NAME` also accepts a file of weights.
    """
    source_kinds = (*SOURCES, "backbone")
    kinds = (*source_kinds, *PART_KINDS) if len(names) > 1 else source_kinds
    kind = match(names[0], kinds) or names[0]
    if len(names) > 1 and (kind not in kinds or len(names) > 2):
        words = ", ".join(kinds)
        raise FczooError(
            f"cannot show {' '.join(names)!r}; give NAME, or KIND NAME with KIND one of {words}"
        )
    if dataset is not None and not _depends_on_dataset(kind):
        raise FczooError(
            f"--dataset is for methods, protocols and releases, not {names[-1]}; leave it out"
        )
    if kind in source_kinds and len(names) == 1:
        click.echo(f"{listing(f'{kind}s')}\n\nfczoo show {kind} NAME describes one.")
    elif kind == "backbone":
        from fczoo.cli.show import backbone_page  # imports torch

        click.echo(backbone_page(names[1]))
    elif kind in SOURCES and len(names) == 2:
        click.echo(source_page(SOURCES[kind].get(names[1]), dataset))
    elif len(names) == 2:
        from fczoo.cli.show import part_page  # imports torch

        click.echo(part_page(names[1], dataset or "digits", PART_KINDS[kind]))
    else:
        click.echo(show_name(kind, dataset))


@click.command(cls=GroupedCommand)
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    help=f"Folder that contains the data.  {DATA_FOLDER}",
)
def doctor(data_root: Path | None) -> None:
    """Show versions, devices, plug-ins, extras, data and weights on this machine."""
    if data_root is not None and not data_root.is_dir():
        raise FczooError(f"--data-root {data_root} is not a folder; give one, or leave it out")
    from fczoo.cli.doctor import doctor as page

    click.echo(page(data_root))


def _depends_on_dataset(word: str) -> bool:
    """Return whether the page of a name depends on the data set."""
    is_method = METHODS.find(word) is not None
    is_kind = word in SOURCES or word == "method"
    return is_method or is_kind or any(r.find(word) for r in SOURCES.values())


def show_name(word: str, dataset: str | None) -> str:
    """Return the page of a name; if it has several meanings, a list of commands that show them.

    Args:
        word: Name in any spelling.
        dataset: Data set whose values are shown. None: digits; for a protocol or release, all.

    Returns:
        The text to print.

    Raises:
        FczooError: The name has no meaning.
    """
    if word.lower() in ("settings", "result") or any(registry.find(word) for registry in PARTS):
        from fczoo.cli.show import part_page  # imports torch

        return part_page(word, dataset or "digits")
    owner, dot, option = word.partition(".")
    if dot and (method := METHODS.find(owner)):
        spelling = match(option, METHODS.options(method))
        if spelling is None:
            advice = nearest(option, METHODS.options(method))
            raise FczooError(f"{method} has no option {option!r}; {advice}")
        return _option_page({method: spelling})
    matches = find_meanings(word.lstrip("-"), dataset)
    if len(matches) == 1:
        ((_, page),) = matches
        return page()
    if matches:
        lines = "\n".join(f"- {line}" for line, _ in matches)
        return f"{word} has {len(matches)} meanings:\n{lines}"
    if advice := _advice(word):
        raise FczooError(f"unknown name {word!r}; {advice}")
    names = {name for registry in (*PARTS, *SOURCES.values()) for name in registry.names()}
    options = {name for method in METHODS.names() for name in METHODS.options(method)}
    settings = {field.name for field in fields(Settings)}
    known_names = {"settings", "result", BUNDLED_NAME} | names | options | settings
    is_known_part = any(fold(word) in fold(name) for name in known_names)
    if not is_known_part and (backbones := names_containing(word)):
        raise FczooError(
            f"unknown name {word!r}; some backbone names contain it: fczoo show backbone "
            f"{backbones[0]}, or {', '.join(backbones[1:]) or 'fczoo list backbones'}"
        )
    advice = "see `fczoo list` and `fczoo show settings` for all names"
    raise FczooError(f"unknown name {word!r}; {nearest_or_advice(word, known_names, advice)}")


def find_meanings(word: str, dataset: str | None) -> list[tuple[str, Callable[[], str]]]:
    """Return the meanings of a name as a protocol, release, backbone, setting or option.

    Args:
        word: Name in any spelling.
        dataset: Data set whose values a protocol or release shows. None: all.

    Returns:
        Pairs of a line with the meaning and its command, and a function that returns the page.
    """
    matches: list[tuple[str, Callable[[], str]]] = []
    for kind, registry in SOURCES.items():
        if name := registry.find(word):
            source, line = registry.get(name), f"the {kind} {name}: fczoo show {kind} {name}"
            matches.append((line, partial(source_page, source, dataset)))
    backbone = canonical_backbone(word)
    if backbone in spellings():
        line = f"the backbone {backbone}: fczoo show backbone {backbone}"
        matches.append((line, lambda: _backbone_page(backbone)))
    if setting := match(word, [field.name for field in fields(Settings)]):
        line = f"the setting {setting} of a run: fczoo bench {flag(setting)}"
        matches.append((line, lambda: _setting_page(setting)))
    if owners := option_owners(word):
        owner_names, (method, option) = join_first_names(list(owners)), next(iter(owners.items()))
        method = method if len(owners) == 1 else "METHOD"
        line = (
            f"an option of {owner_names}: fczoo show {method} prints its value, --set "
            f"{method}.{option}=VALUE sets it"
        )
        matches.append((line, lambda: _option_page(owners)))
    return matches


def _advice(word: str) -> str:
    """Return advice for a kind of names, an option of bench, or an option of another tool."""
    from fczoo.cli.bench import bench

    options = {param.name or "": param for param in bench.params}
    if kind := match(word, KINDS):
        return f"see fczoo list {kind}"
    if option := match(word.lstrip("-"), options):
        return f"{options[option].opts[0]} is an option: see fczoo bench --help"
    return option_pointer(word, options)


def _backbone_page(name: str) -> str:
    from fczoo.cli.show import backbone_page  # imports torch

    return backbone_page(name)


def _setting_page(name: str) -> str:
    field = next(field for field in fields(Settings) if field.name == name)
    rows = [
        ("setting", name),
        ("option", f"fczoo bench {flag(name)}"),
        ("meaning", field.metadata["meaning"]),
        ("default", option_word(field.default)),
        ("group", field.metadata["group"]),
    ]
    if registry := REGISTRY_OF_SETTING.get(name):
        rows.append(("names", ", ".join(registry.names())))
    return plain_table(rows)


def _option_page(owners: Mapping[str, str]) -> str:
    """Return the page of an option; ``owners`` has its spelling by method."""
    rows = []
    for owner, option in owners.items():
        declaration = METHODS.options(owner)[option]
        rows.append(
            (f"{owner}.{option}", f"{option_word(declaration.default)}: {declaration.meaning}")
        )
    method = next(iter(owners))
    return (
        f"An option of {plural(len(owners), 'method')}, with its "
        f"default:\n\n{plain_table(rows)}\n\n"
        f"fczoo bench --methods {method} --set {rows[0][0]}=VALUE sets it; "
        f"fczoo show {method} has all options of {method}."
    )


DEFAULTS = {f.name: f.default for f in fields(Settings)}
WIDTH = 120  # columns of running text

PRINT_NOTE = (
    "Column 'in print': the paper's value, if the value used is from another source; 'open' if the "
    "paper does not state one."
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
    parts += [_overview(source)] if dataset is None else _dataset_parts(source, dataset)
    notes = [
        textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        for note in source.notes
    ]
    return "\n\n".join([*parts, *(["\n".join(["Notes:", *notes])] if notes else [])])


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
    dataset_note = " Other data sets also work." if source.any_dataset else ""
    head = ["data set", *(f.replace("_", " ") for f in field_names)]
    hint = (
        f"All values with their sources: fczoo show {source.kind} {source.name} --dataset NAME."
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


def _dataset_parts(source: Source, dataset: str) -> list[str]:
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
        parts.append(f"Its partitions (--partition): {'  '.join(source.partitions[dataset])}")
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
            "Hyper-parameters; other options have the method's "
            f"defaults:\n{word_table(options, head)}"
        )
    all_values += [v for name in names for v in source.hyperparameters(name, dataset).values()]
    return [*parts, *([PRINT_NOTE] if any(map(_print_word, all_values)) else [])]


def _source(statement: Statement) -> str:
    if not isinstance(statement.value, ValuesByBeta):
        return statement.source
    return f"{statement.source}, at beta {' | '.join(map(option_word, statement.value.values))}"
