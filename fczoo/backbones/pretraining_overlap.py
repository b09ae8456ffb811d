"""Data on which backbones were pre-trained, and the classes of a data set that they saw there."""

import re
from collections.abc import Mapping

from fczoo.backbones.names import BUNDLED_NAME, full_name, registered_backbone
from fczoo.backbones.weights import split_stored_spec
from fczoo.core.registry import DATASETS

TITLES = {
    "tinyimagenet": "Tiny-ImageNet",
    "imagenet1k": "ImageNet-1k",
    "imagenet21k": "ImageNet-21k",
    "lvd142m": "LVD-142M",
    "lvd1689m": "LVD-1689M",
    "sat493m": "SAT-493M",
    "webli": "WebLI",
    "openai": "OpenAI's 400 million image-text pairs",
    "laion400m": "LAION-400M",
    "laion2b": "LAION-2B",
    "datacompxl": "DataComp-1B",
    "dfn2b": "DFN-2B",
    "dfn5b": "DFN-5B",
    "metaclip": "MetaCLIP's image-text pairs",
    "metaclip2": "MetaCLIP 2's image-text pairs",
    "merged2b": "Merged-2B",
    "m30m": "Merged-30M",
    "m38m": "Merged-38M",
    "yfcc15m": "YFCC-15M",
}
"""Pre-training sets, by the names under which data sets declare the classes that they share.

Data sets declare classes of the first three only.
"""

COMMON_SETS = frozenset({"imagenet1k", "imagenet21k"})
"""Pre-training sets that the papers of the field use."""

SUPERSETS = {"imagenet21k": "imagenet1k"}
"""Pre-training sets that contain all classes of another one."""

CLASSES = {
    "all": "these classes",
    "some": "some of these classes",
    "similar": "classes similar to some of these",
}
"""Degrees of overlap in words, the largest first."""

_HASHES = {  # SHA-256 of weight files
    "3ffadaa2e488f0de67e1f4459d5a303deca3de69e44e52619c0b0848d99d5c14": BUNDLED_NAME,
    "38ed24e369e115a1b0308dbaa97ebbf5bf6a51cb03717d9851e4070514df6016": (
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    ),
}
_TAG_PATTERN = re.compile(r"(?:vit|deit3?|eva|eva02|flexivit|beit3)_\w+\.(\w+)")
_TAG_SETS = {
    "in21k": "imagenet21k",
    "in22k": "imagenet21k",
    "in12k": "imagenet21k",
    "in1k": "imagenet1k",
}
_SELF_SUPERVISED_TAGS = frozenset(
    {"dino", "mae"}
)  # tags of weights trained on images of ImageNet-1k


def pretraining_sets(name: str) -> tuple[str, ...]:
    """Return the data sets on which a named backbone was trained.

    Args:
        name: Bundled name, name of a plug-in, or timm name with a tag. A timm name without a tag
            names an architecture, not weights: see ``full_name``.

    Returns:
        Keys of ``TITLES``; empty if they are not known.
    """
    if name == BUNDLED_NAME:
        return ("tinyimagenet",)
    if entry := registered_backbone(name):
        return tuple(key for key in getattr(entry, "pretraining", ()) if key in TITLES)
    match = _TAG_PATTERN.fullmatch(name)
    if match is None:
        return ()
    parts = match[1].split("_")
    if parts[0] in _SELF_SUPERVISED_TAGS:
        return ("imagenet1k",)
    words = [_TAG_SETS.get(part, part) for part in parts]
    return tuple(dict.fromkeys(word for word in words if word in TITLES))


def describe_pretraining(name: str) -> str:
    """Describe the data on which a named backbone was trained.

    Args:
        name: Name as for ``pretraining_sets``.
    """
    sets = pretraining_sets(name)
    return " and ".join(TITLES[key] for key in sets) if sets else "not known"


def identify_weights(spec: str, sha256: str = "") -> str:
    """Return the bundled or timm name of the weights behind ``--backbone``.

    A file is identified by its hash, its file name, or the timm name with a tag in ``NAME:FILE``.

    Args:
        spec: Name, file, or both.
        sha256: SHA-256 of the weight file, if known.

    Returns:
        The name; empty if unknown.
    """
    if sha256 in _HASHES:
        return _HASHES[sha256]
    architecture, file = split_stored_spec(spec)
    # in NAME:FILE the bundled name gives only the architecture, which does not have another name
    timm_name = "" if architecture == BUNDLED_NAME else architecture
    names = [full_name(architecture)] if file is None else [file.stem, timm_name]
    return next((name for name in names if pretraining_sets(name)), "")


def shared_classes(dataset: str, backbone: str) -> dict[str, str]:
    """Return the overlap of a data set with each pre-training set of a named backbone.

    Args:
        dataset: Name of the data set; an unknown one has no overlap.
        backbone: Name of the backbone with its weights.

    Returns:
        Pre-training set -> overlap; without sets that have none.
    """
    if dataset not in DATASETS:
        return {}
    dataset_overlaps: Mapping[str, str] = DATASETS.get(dataset).overlaps
    sets = {key: (key, SUPERSETS.get(key, "")) for key in pretraining_sets(backbone)}
    overlaps = {
        key: next((dataset_overlaps[k] for k in keys if k in dataset_overlaps), None)
        for key, keys in sets.items()
    }
    return {key: overlap for key, overlap in overlaps.items() if overlap}


def contamination(dataset: str, backbone: str) -> str:
    """Describe classes of a data set that a named backbone saw in pre-training; empty if unknown.

    Args:
        dataset: Name of the data set.
        backbone: Name of the backbone with its weights.
    """
    overlaps = shared_classes(dataset, backbone)
    uncommon_overlaps = {
        key: overlap for key, overlap in overlaps.items() if key not in COMMON_SETS
    }
    if uncommon_overlaps:
        titles, classes = _describe_sets(uncommon_overlaps)
        return f"{backbone} was pre-trained on {titles}, with labels of {classes}"
    if overlaps:
        titles, classes = _describe_sets(overlaps)
        return f"{titles} weights were pre-trained on images of {classes}, as in the papers"
    return ""


def _describe_sets(shared: Mapping[str, str]) -> tuple[str, str]:
    """Return the titles of the pre-training sets and the largest overlap with one of them."""
    largest = next(words for overlap, words in CLASSES.items() if overlap in shared.values())
    return " and ".join(TITLES[key] for key in shared), largest
