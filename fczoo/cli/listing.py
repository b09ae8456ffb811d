"""What ``fczoo list`` prints. Most kinds are read from source, so that nothing heavy is imported."""

from collections.abc import Mapping
from typing import Any

import click

from fczoo.backbones.names import backbone_names
from fczoo.cli.method_list import list_methods
from fczoo.core.options import Declared, declared, quirks
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    DATASETS,
    LOCAL_TRAINING,
    MERGES,
    METHODS,
    PARTITIONERS,
    PROTOCOLS,
    RELEASES,
    Registry,
)
from fczoo.federation.settings import Settings
from fczoo.papers.protocol import Source
from fczoo.reports.words import plain_table, word_table

KINDS = {
    "methods": "all methods, by group: year, what is trained, what is sent",
    "baselines": "methods to compare them with",
    "datasets": "images, and the schedule that bench uses on them",
    "partitioners": "how images are split over clients",
    "aggregators": "how a server averages (--aggregator)",
    "merges": "how the server of one method merges what it does not average",
    "attacks": "what hostile clients do",
    "local": "how clients train, whatever the method (--local)",
    "protocols": "how papers run their experiments",
    "releases": "what released code does, all options at once (--as-released)",
    "backbones": "pre-trained vision transformers",
    "quirks": "options that follow released code against its paper",
}
REGISTRIES: dict[str, Registry[Any]] = {
    "datasets": DATASETS,
    "partitioners": PARTITIONERS,
    "aggregators": AGGREGATORS,
    "merges": MERGES,
    "attacks": ATTACKS,
    "local": LOCAL_TRAINING,
    "protocols": PROTOCOLS,
    "releases": RELEASES,
}

SOURCES = {"protocol": PROTOCOLS, "release": RELEASES}
"""Kinds of what settings come from, as ``fczoo show KIND NAME`` has them."""


def kinds() -> str:
    """What may be listed."""
    return f"{plain_table(KINDS.items())}\n\nfczoo list KIND names all of one kind."


def listing(kind: str) -> str:
    """Names of one kind, each with a line on what it is."""
    if kind == "methods":
        return list_methods()
    if kind == "backbones":
        return "\n".join(backbone_names())
    if kind == "quirks":
        return _quirks()
    registry = REGISTRIES.get(kind, METHODS)
    names = registry.names("fczoo.baselines" if kind == "baselines" else None)
    return plain_table([(name, registry.about(name)) for name in names])


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """What a shell offers after ``fczoo show``."""
    if before := ctx.params.get("names"):
        registry = SOURCES.get(before[0], PROTOCOLS)
        return [name for name in registry.names() if name.startswith(incomplete)]
    registries = METHODS, DATASETS, PARTITIONERS, AGGREGATORS, MERGES, ATTACKS, LOCAL_TRAINING
    known = [*SOURCES, "settings", *(name for registry in registries for name in registry.names())]
    return [name for name in known if name.startswith(incomplete)]


def _quirks() -> str:
    """Options made for a deviation of released code, and all in which a release differs from fczoo."""
    owners = {name: METHODS.options(name) for name in METHODS.names()} | {"bench": declared(Settings)}
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
        "All that a release sets other than fczoo does, with sources in `fczoo show release NAME`:\n"
        f"{word_table(together, ['--as-released', 'of', 'options'])}"
    )


def _changes(release: type[Source], owners: Mapping[str, Mapping[str, Declared]]) -> dict[str, list[str]]:
    """Words for the options that a release changes, by owner; several values are those of data sets."""
    found: dict[str, list[str]] = {}
    for (owner, name), stated in release.everything().items():
        if owner in owners:
            usual = owners[owner][name].default
            words = dict.fromkeys(s.word for s in stated if s.value != usual)
            if words:
                found.setdefault(owner, []).append(f"{name}={' | '.join(words)}")
    return found
