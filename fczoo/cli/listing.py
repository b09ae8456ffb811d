"""Output of ``fczoo list``.

Most lists come from parsed source, and facts about methods from a table. Thus neither torch nor a
method is imported.
"""

import csv
import itertools
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import click

from fczoo.backbones.names import BACKBONES, UNSUPPORTED, backbone_names
from fczoo.backbones.pretraining_overlap import describe_pretraining
from fczoo.core.options import OptionDeclaration, dataclass_options, quirks
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    AUGMENTATIONS,
    COMPRESSIONS,
    DATASETS,
    LOCAL_TRAINING,
    MERGES,
    METHODS,
    PARTITIONERS,
    SERVER_OPTIMIZERS,
    Registry,
)
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import PROTOCOLS, RELEASES
from fczoo.protocols.stated_values import SettingReference, Source, Statement
from fczoo.reports.text_format import columns, option_word, plain_table, word_table

KINDS = {
    "methods": "all methods, by group: year, what is trained, what is sent",
    "baselines": "methods for comparison",
    "datasets": "images, and the schedule that bench uses on them",
    "partitioners": "how images are divided among clients",
    "aggregators": "how a server averages (--aggregator)",
    "merges": "server steps of single methods, in place of an average of all tensors",
    "attacks": "what hostile clients do",
    "local": "rules of local training, for most methods (--local)",
    "server_optimizers": "how the server applies the average of a round (--server-optimizer)",
    "compressions": "encodings of uploads (--compress)",
    "protocols": "settings of papers, and the short schedule quick (--protocol)",
    "releases": "settings and options of papers' released code (--as-released)",
    "augmentations": "random views of training images (--augment)",
    "metrics": "columns of tables (fczoo report --metrics)",
    "backbones": "pre-trained vision transformers",
    "quirks": "options that follow released code where it differs from the paper",
}
REGISTRIES: dict[str, Registry[Any]] = {
    "datasets": DATASETS,
    "augmentations": AUGMENTATIONS,
    "partitioners": PARTITIONERS,
    "aggregators": AGGREGATORS,
    "merges": MERGES,
    "attacks": ATTACKS,
    "local": LOCAL_TRAINING,
    "server_optimizers": SERVER_OPTIMIZERS,
    "compressions": COMPRESSIONS,
    "protocols": PROTOCOLS,
    "releases": RELEASES,
}

PARTS = (
    *(METHODS, DATASETS, PARTITIONERS, AGGREGATORS, MERGES, ATTACKS),
    *(LOCAL_TRAINING, SERVER_OPTIMIZERS, COMPRESSIONS, AUGMENTATIONS),
)
"""Registries whose entries have pages in ``fczoo show NAME``, in order of the search."""

SOURCES = {"protocol": PROTOCOLS, "release": RELEASES}
"""Kinds of sources of settings, for ``fczoo show KIND NAME``."""
PART_KINDS = {
    "method": METHODS,
    **{kind.removesuffix("s"): r for kind, r in REGISTRIES.items() if r in PARTS},
}
"""Kinds of other registered names, for ``fczoo show KIND NAME``."""

# written by benchmarks/method_facts.py
TABLE = Path(str(files("fczoo") / "assets" / "methods.csv"))

GROUPS = {
    "methods": "Methods of Federated Class-Incremental Learning that fczoo compares.",
    "baselines": "Baselines without exemplars.",
    "exemplars": "Baselines that keep exemplars of old classes.",
    "analytic": "Analytic baselines, which train nothing and send statistics.",
    "bounds": "Upper bounds, which keep all old images.",
    "plug-ins": "Installed plug-ins.",
}
"""Heading by group, in the order of the list."""

NOTES = (
    "Sent: weights that are trained; counts, means, variances and second moments of classes.",
    "kB up: thousands of bytes that a client uploads in a round of the first task of digits.",
    "fczoo show METHOD describes one method.",
)

HEAD = ("method", "year", "trained", "sent", "kB up", "description")
BYTES_COLUMN = HEAD.index("kB up")  # aligned to the right
NARROW_WIDTHS = {"trained": 16, "sent": 33}  # widths on a terminal of 80 columns
UNKNOWN = "?"
GAP = 2  # spaces between columns


def list_kinds() -> str:
    """List the kinds of names."""
    return f"{plain_table(KINDS.items())}\n\nfczoo list KIND lists all names of one kind."


def listing(kind: str) -> str:
    """List the names of one kind with one-line descriptions.

    Args:
        kind: A key of ``KINDS``.

    Returns:
        The text to print.
    """
    if kind == "methods":
        return list_methods()
    if kind == "backbones":
        return _backbones()
    if kind == "quirks":
        return _quirks()
    if kind == "metrics":
        from fczoo.reports.tables import all_columns  # imports numpy

        return plain_table([(column.name, column.meaning) for column in all_columns().values()])
    registry = REGISTRIES.get(kind, METHODS)
    names = registry.names("fczoo.baselines" if kind == "baselines" else None)
    return plain_table([(name, registry.about(name)) for name in names])


def _backbones() -> str:
    """List backbones with their pre-training data, and unsupported ones."""
    plugins = {name: BACKBONES.about(name) for name in BACKBONES.names()}
    names = backbone_names()
    table = plain_table([(name, plugins.get(name) or describe_pretraining(name)) for name in names])
    return (
        f"{table}\n\n{UNSUPPORTED}. timm/NAME and hf-hub:timm/NAME are spellings of the same names; "
        "fczoo show backbone NAME describes one."
    )


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return shell completions of ``fczoo show``.

    Args:
        ctx: Context of the command with the names so far.
        param: The argument; not used.
        incomplete: Prefix of the last name.

    Returns:
        Names with this prefix.
    """
    if previous_names := ctx.params.get("names"):
        if previous_names[0] == "backbone":
            return [name for name in backbone_names() if name.startswith(incomplete)]
        registry = {**PART_KINDS, **SOURCES}.get(previous_names[0], PROTOCOLS)
        return [name for name in registry.names() if name.startswith(incomplete)]
    candidates = [
        *SOURCES,
        "backbone",
        "settings",
        *(name for registry in PARTS for name in registry.names()),
    ]
    return [name for name in candidates if name.startswith(incomplete)]


def _quirks() -> str:
    """List options that follow released code, and all options in which a release differs."""
    owners = {name: METHODS.options(name) for name in METHODS.names()} | {
        "bench": dataclass_options(Settings)
    }
    owners |= {name: PARTITIONERS.options(name) for name in PARTITIONERS.names()}
    single = [
        (f"{owner}.{q.field}={q.value}", q.meaning, q.place)
        for owner, options in owners.items()
        for q in quirks(options)
    ]
    together = [
        (release, owner, ", ".join(changes))
        for release in RELEASES.names()
        for owner, changes in _changes(RELEASES.get(release), owners).items()
    ]
    return (
        f"{word_table(single, ['option', 'what it does', 'seen in'])}\n\n"
        "All options that a release sets differently from fczoo, with sources in `fczoo show "
        "release NAME`:\n"
        f"{word_table(together, ['--as-released', 'of', 'options'])}"
    )


def value_words(statement: Statement) -> str:
    """Format the value of a statement, or its values for several betas.

    Args:
        statement: Statement of a protocol or release.
    """
    if statement.depends_on_tasks:
        return "by the number of tasks"
    return " | ".join(
        f"bench.{value.name}" if isinstance(value, SettingReference) else option_word(value)
        for value in statement.columns
    )


def _changes(
    release: Source, owners: Mapping[str, Mapping[str, OptionDeclaration]]
) -> dict[str, list[str]]:
    """Describe the options that a release changes, by owner.

    Several values of an option belong to different data sets.
    """
    changes_by_owner: dict[str, list[str]] = {}
    for (owner, name), stated_values in release.all_statements().items():
        if owner in owners:
            usual = owners[owner][name].default
            words = dict.fromkeys(value_words(s) for s in stated_values if s.value != usual)
            if words:
                changes_by_owner.setdefault(owner, []).append(f"{name}={' | '.join(words)}")
    return changes_by_owner


class MethodFacts(NamedTuple):
    """One row of the table."""

    method: str
    group: str
    year: str
    trained: str
    sent: str
    bytes: str


def list_methods() -> str:
    """List all methods by group; on a narrow terminal without descriptions."""
    facts_by_method = read_facts()
    facts = [
        facts_by_method.get(name) or _facts_without_measurement(name) for name in METHODS.names()
    ]
    cells = {fact.method: _cells(fact) for fact in facts}
    widths = [max(map(len, column)) for column in zip(HEAD, *cells.values(), strict=True)]
    width = columns() or sum(widths) + GAP * len(widths)
    if sum(widths) + GAP * (len(widths) - 1) > width:
        widths = widths[:-1]  # without the sentence
    if sum(widths) + GAP * (len(widths) - 1) > width:
        widths = [
            min(width, NARROW_WIDTHS.get(name, width))
            for name, width in zip(HEAD, widths, strict=False)
        ]
    lines = _lines(HEAD, widths)
    for group, heading in GROUPS.items():
        rows = [line for f in facts if f.group == group for line in _lines(cells[f.method], widths)]
        lines += [heading, *rows] if rows else []
    if any(fact not in facts_by_method.values() for fact in facts):
        lines.append(
            f"{UNKNOWN}: not measured; the method is newer than this table or from a plug-in."
        )
    notes = [textwrap.fill(note, max(width, 40)) for note in NOTES]
    return "\n".join([*lines, *notes])


def read_facts() -> dict[str, MethodFacts]:
    """Return the rows of the table by method."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["method"]: MethodFacts(**row) for row in csv.DictReader(file)}


def group_of(method: str) -> str:
    """Return the group in which ``fczoo list methods`` shows a method.

    Args:
        method: Registered name.
    """
    return (read_facts().get(method) or _facts_without_measurement(method)).group


def _facts_without_measurement(name: str) -> MethodFacts:
    """Return the row of a method that the table does not have, such as a plug-in's."""
    places = {"methods": "fczoo.methods.", "baselines": "fczoo.baselines."}
    group = next((g for g, package in places.items() if name in METHODS.names(package)), "plug-ins")
    return MethodFacts(name, group, "", UNKNOWN, UNKNOWN, "")


def _cells(fact: MethodFacts) -> tuple[str, ...]:
    """Return the cells of a row, with bytes in thousands and the method's description."""
    size = f"{int(fact.bytes) / 1000:,.1f}" if fact.bytes else UNKNOWN
    return (
        f"  {fact.method}",
        fact.year or "-",
        fact.trained,
        fact.sent,
        size,
        METHODS.about(fact.method),
    )


def _lines(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Format a row in columns; a cell wider than its column is wrapped."""
    cell_widths = zip(cells, widths, strict=False)  # the last cell may be left out
    parts = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width) for cell, width in cell_widths
    ]
    lines = []
    for line in itertools.zip_longest(*parts, fillvalue=""):
        aligned_cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        aligned_cells[BYTES_COLUMN] = line[BYTES_COLUMN].rjust(widths[BYTES_COLUMN])
        lines.append((" " * GAP).join(aligned_cells).rstrip())
    return lines
