"""Overlap of a backbone's pre-training classes with those of a data set."""

from collections.abc import Mapping

from fczoo.backbones.weights import (
    IN_PAPERS,
    SUPERSETS,
    TITLES,
    identify_weights,
    pretraining_sets,
)
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Overlap
from fczoo.reports.run_folder import About

CLASSES = {
    "all": "these classes",
    "some": "some of these classes",
    "similar": "classes like some of these",
}
"""Degrees of overlap in words, the largest first."""


def shared_classes(dataset: str, backbone: str) -> dict[str, Overlap]:
    """Return the overlap of a data set with each pre-training set of a named backbone.

    Args:
        dataset: Name of the data set; an unknown one has no overlap.
        backbone: Name of the backbone with its weights.

    Returns:
        Pre-training set -> overlap; without sets that have none.
    """
    if dataset not in DATASETS.names():
        return {}
    dataset_overlaps: Mapping[str, Overlap] = DATASETS.get(dataset).overlaps
    sets = {key: (key, SUPERSETS.get(key, "")) for key in pretraining_sets(backbone)}
    overlaps = {
        key: next((dataset_overlaps[k] for k in keys if k in dataset_overlaps), None)
        for key, keys in sets.items()
    }
    return {key: overlap for key, overlap in overlaps.items() if overlap}


def contamination(dataset: str, backbone: str) -> str:
    """Describe how a named backbone met the classes of a data set in training; empty if unknown.

    Args:
        dataset: Name of the data set.
        backbone: Name of the backbone with its weights.
    """
    overlaps = shared_classes(dataset, backbone)
    unusual = {key: overlap for key, overlap in overlaps.items() if key not in IN_PAPERS}
    if unusual:
        titles, classes = _describe_sets(unusual)
        return f"backbone trained with labels of {classes}: {backbone} learned from {titles}"
    if overlaps:
        titles, classes = _describe_sets(overlaps)
        return f"{titles} weights saw images of {classes} in pre-training, as in the papers"
    return ""


def run_contamination(about: About) -> str:
    """Describe how the backbone of a run folder of any version met the classes in training.

    Args:
        about: Description of the run folder.
    """
    spec, sha256 = str(about.settings.get("backbone", "")), about.backbone["sha256"]
    return contamination(about.settings["dataset"], identify_weights(spec, sha256))


def _describe_sets(shared: Mapping[str, Overlap]) -> tuple[str, str]:
    """Return the titles of the pre-training sets and the largest overlap with one of them."""
    largest = next(words for overlap, words in CLASSES.items() if overlap in shared.values())
    return " and ".join(TITLES[key] for key in shared), largest
