"""Spell the names in settings as they are registered."""

from collections.abc import Mapping
from typing import Any

from fczoo.backbones.names import canonical_backbone
from fczoo.core.names import fold
from fczoo.core.registry import DATASETS, PROTOCOLS, RELEASES, SPECS, Registry

REGISTERED: dict[str, Registry[Any]] = {
    "dataset": DATASETS,
    "protocol": PROTOCOLS,
    "as_released": RELEASES,
    **SPECS,
}
"""Settings that name a registered thing, with or without its options, and where it is registered."""


def spell_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return those settings that name something, in the one spelling that is stored.

    Names that are not registered stay as they are.
    """
    given = {name: settings[name] for name in REGISTERED if settings[name]}
    spelled = {name: REGISTERED[name].canonical(spec) for name, spec in given.items()}
    backbone, augment = canonical_backbone(settings["backbone"]), fold(settings["augment"])
    return {**spelled, "backbone": backbone, "augment": augment}
