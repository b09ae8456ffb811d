"""What ``fczoo list`` prints. Most kinds are read from source, so that nothing heavy is imported."""

from typing import Any

import click
from tabulate import tabulate

from fczoo.core.options import quirks
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    DATASETS,
    MERGES,
    METHODS,
    PARTITIONERS,
    PROTOCOLS,
    Registry,
)
from fczoo.federation.settings import Settings

KINDS = {
    "methods": "what fczoo compares",
    "baselines": "methods to compare them with",
    "datasets": "images, and the schedule that bench uses on them",
    "partitioners": "how images are split over clients",
    "aggregators": "how a server averages (--aggregator)",
    "merges": "how the server of one method merges what it does not average",
    "attacks": "what hostile clients do",
    "protocols": "how papers run their experiments",
    "backbones": "pre-trained vision transformers",
    "quirks": "options that follow released code against its paper",
}
REGISTRIES: dict[str, Registry[Any]] = {
    "datasets": DATASETS,
    "partitioners": PARTITIONERS,
    "aggregators": AGGREGATORS,
    "merges": MERGES,
    "attacks": ATTACKS,
    "protocols": PROTOCOLS,
}


def kinds() -> str:
    """What may be listed."""
    return f"{tabulate(KINDS.items(), tablefmt='plain')}\n\nfczoo list KIND names all of one kind."


def listing(kind: str) -> str:
    """Names of one kind, each with a line on what it is."""
    if kind == "backbones":
        from fczoo.backbones.timm_vit import backbone_names  # imports torch

        return "\n".join(backbone_names())
    if kind == "quirks":
        head = ["option", "what it does", "seen in"]
        return tabulate(_quirks(), head, tablefmt="simple", maxcolwidths=[None, 80, 60])
    registry = REGISTRIES.get(kind, METHODS)
    names = registry.names()
    if registry is METHODS:
        baselines = METHODS.names("fczoo.baselines")
        names = baselines if kind == "baselines" else [n for n in names if n not in baselines]
    return tabulate([(name, registry.about(name)) for name in names], tablefmt="plain")


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """What a shell offers after ``fczoo show``."""
    if ctx.params.get("names"):
        return [name for name in PROTOCOLS.names() if name.startswith(incomplete)]
    registries = METHODS, DATASETS, PARTITIONERS, AGGREGATORS, MERGES, ATTACKS
    known = ["protocol", "settings", *(name for registry in registries for name in registry.names())]
    return [name for name in known if name.startswith(incomplete)]


def _quirks() -> list[tuple[str, str, str]]:
    """Deviations found in released code: option, what it changes, where it was seen."""
    owners = [
        *((n, METHODS.get(n)) for n in METHODS.names()),
        ("bench", Settings),
        *((n, PARTITIONERS.get(n)) for n in PARTITIONERS.names()),
    ]
    return [
        (f"{owner}.{name}={value}", cls.__dataclass_fields__[name].metadata["meaning"], place)
        for owner, cls in owners
        for name, value, place in quirks(cls)
    ]
