"""Output of ``fczoo list``.

Most kinds are read from source, so that nothing heavy is imported.
"""

from collections.abc import Mapping
from typing import Any

import click

from fczoo.backbones.names import UNSUPPORTED, backbone_names
from fczoo.backbones.weights import describe_pretraining
from fczoo.cli.method_list import list_methods
from fczoo.core.options import OptionDeclaration, dataclass_options, quirks
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
from fczoo.reports.text_format import plain_table, word_table

KINDS = {
    "methods": "all methods, by group: year, what is trained, what is sent",
    "baselines": "methods to compare them with",
    "datasets": "images, and the schedule that bench uses on them",
    "partitioners": "how images are split over clients",
    "aggregators": "how a server averages (--aggregator)",
    "merges": "how the server of one method merges tensors that it does not average",
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

PARTS = (METHODS, DATASETS, PARTITIONERS, AGGREGATORS, MERGES, ATTACKS, LOCAL_TRAINING)
"""Registries for which ``fczoo show NAME`` has pages, in the order in which a name is searched."""

SOURCES = {"protocol": PROTOCOLS, "release": RELEASES}
"""Kinds of sources of settings, for ``fczoo show KIND NAME``."""


def kinds() -> str:
    """Return the kinds that may be listed."""
    return f"{plain_table(KINDS.items())}\n\nfczoo list KIND names all of one kind."


def listing(kind: str) -> str:
    """Return the names of one kind, each with a one-line description.

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
    registry = REGISTRIES.get(kind, METHODS)
    names = registry.names("fczoo.baselines" if kind == "baselines" else None)
    return plain_table([(name, registry.about(name)) for name in names])


def _backbones() -> str:
    """List the names of backbones with their pre-training data, and what is not supported."""
    table = plain_table([(name, describe_pretraining(name)) for name in backbone_names()])
    return (
        f"{table}\n\n{UNSUPPORTED}. timm/NAME and hf-hub:timm/NAME are spellings of the same names; "
        "fczoo show backbone NAME describes one."
    )


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return shell completions of ``fczoo show``.

    Args:
        ctx: Context of the command with the names so far.
        param: The argument; not used.
        incomplete: Beginning of the last word.

    Returns:
        Names that begin like this.
    """
    if previous_names := ctx.params.get("names"):
        if previous_names[0] == "backbone":
            return [name for name in backbone_names() if name.startswith(incomplete)]
        registry = SOURCES.get(previous_names[0], PROTOCOLS)
        return [name for name in registry.names() if name.startswith(incomplete)]
    candidates = [
        *SOURCES,
        "backbone",
        "settings",
        *(name for registry in PARTS for name in registry.names()),
    ]
    return [name for name in candidates if name.startswith(incomplete)]


def _quirks() -> str:
    """Format options that follow released code, and all options in which a release differs."""
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


def _changes(
    release: type[Source], owners: Mapping[str, Mapping[str, OptionDeclaration]]
) -> dict[str, list[str]]:
    """Describe the options that a release changes, by owner.

    Several values of an option belong to different data sets.
    """
    changes_by_owner: dict[str, list[str]] = {}
    for (owner, name), stated_values in release.everything().items():
        if owner in owners:
            usual = owners[owner][name].default
            words = dict.fromkeys(s.text for s in stated_values if s.value != usual)
            if words:
                changes_by_owner.setdefault(owner, []).append(f"{name}={' | '.join(words)}")
    return changes_by_owner
