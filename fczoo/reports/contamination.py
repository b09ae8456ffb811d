"""Whether a backbone has met the classes of a data set in its training."""

from collections.abc import Mapping

from fczoo.backbones.pretraining import (
    IN_PAPERS,
    SUPERSETS,
    TITLES,
    identify_weights,
    pretraining_sets,
)
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Overlap
from fczoo.reports.run_folder import About

CLASSES = {"all": "these classes", "some": "some of these classes", "similar": "classes like some of these"}
"""Degrees of overlap in words, the largest first."""


def shared_classes(dataset: str, backbone: str) -> dict[str, Overlap]:
    """Return the overlap of a data set with each pre-training set of a named backbone."""
    if dataset not in DATASETS.names():
        return {}
    declared: Mapping[str, Overlap] = DATASETS.get(dataset).overlaps
    sets = {key: (key, SUPERSETS.get(key, "")) for key in pretraining_sets(backbone)}
    overlaps = {key: next((declared[k] for k in keys if k in declared), None) for key, keys in sets.items()}
    return {key: overlap for key, overlap in overlaps.items() if overlap}


def contamination(dataset: str, backbone: str) -> str:
    """Describe how a named backbone met the classes of a data set in training; empty if unknown."""
    shared = shared_classes(dataset, backbone)
    unusual = {key: overlap for key, overlap in shared.items() if key not in IN_PAPERS}
    if unusual:
        titles, classes = _describe_sets(unusual)
        return f"backbone trained with labels of {classes}: {backbone} learned from {titles}"
    if shared:
        titles, classes = _describe_sets(shared)
        return f"{titles} weights saw images of {classes} in pre-training, as in the papers"
    return ""


def contamination_of(about: About) -> str:
    """Describe it for a run folder of any version."""
    spec, sha256 = str(about.settings.get("backbone", "")), about.backbone["sha256"]
    return contamination(about.settings["dataset"], identify_weights(spec, sha256))


def _describe_sets(shared: Mapping[str, Overlap]) -> tuple[str, str]:
    """Return the titles of the pre-training sets and the largest overlap with one of them."""
    largest = next(words for overlap, words in CLASSES.items() if overlap in shared.values())
    return " and ".join(TITLES[key] for key in shared), largest
