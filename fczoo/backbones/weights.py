"""Weights of backbones: their files, and the data on which they were pre-trained.

The classes of these data may overlap with those of a data set of fczoo.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from fczoo.backbones.names import (
    BUNDLED_NAME,
    SUFFIXES,
    canonical_backbone,
    full_name,
    registered_backbone,
)
from fczoo.core.files import home
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

IN_PAPERS = frozenset({"imagenet1k", "imagenet21k"})
"""Pre-training sets that the papers of the field use."""

SUPERSETS = {"imagenet21k": "imagenet1k"}
"""Pre-training sets that contain all classes of another one."""

CLASSES = {
    "all": "these classes",
    "some": "some of these classes",
    "similar": "classes like some of these",
}
"""Degrees of overlap in words, the largest first."""

_HASHES = {  # SHA-256 of weight files
    "3ffadaa2e488f0de67e1f4459d5a303deca3de69e44e52619c0b0848d99d5c14": BUNDLED_NAME,
    "38ed24e369e115a1b0308dbaa97ebbf5bf6a51cb03717d9851e4070514df6016": (
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    ),
}
_TAG_PATTERN = re.compile(r"(?:vit|deit3?|eva|eva02|flexivit|beit3)_\w+\.(\w+)")
_IN_TAG = {
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
    words = [_IN_TAG.get(part, part) for part in parts]
    return tuple(dict.fromkeys(word for word in words if word in TITLES))


def describe_pretraining(name: str) -> str:
    """Describe the data on which a named backbone was trained.

    Args:
        name: Name as for ``pretraining_sets``.
    """
    sets = pretraining_sets(name)
    return " and ".join(TITLES[key] for key in sets) if sets else "not known"


def describe_head(name: str, outputs: int) -> str:
    """Describe the head of timm's weights, which fczoo drops; empty without one.

    Args:
        name: Name of a timm model with its tag.
        outputs: Number of outputs of the head.
    """
    if not outputs:
        return ""
    architecture, _, tag = name.partition(".")
    is_projector = "_clip_" in architecture and "_ft_" not in tag
    return (
        f"projector to {outputs:,} dimensions"
        if is_projector
        else f"classification head of {outputs:,} classes"
    )


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
    architecture, file = split_spec(spec)
    # in NAME:FILE the bundled name gives only the architecture, which does not have another name
    timm_name = "" if architecture == BUNDLED_NAME else architecture
    names = [full_name(architecture)] if file is None else [file.stem, timm_name]
    return next((name for name in names if pretraining_sets(name)), "")


HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # names under which timm's hub keeps weights
MEGABYTES = {"tiny": 23, "small": 88, "base": 346, "large": 1217}  # fp32, 1,000 classes or no head
MEGABYTES_IN21K = {"tiny": 39, "small": 120, "base": 410, "large": 1303}  # a head of 21,843 classes


def split_spec(spec: str) -> tuple[str, Path | None]:
    """Split a backbone's ``NAME``, ``FILE`` or ``NAME:FILE`` into name and file.

    Args:
        spec: Name, file, or both.

    Returns:
        The name, in its listed spelling if it is known, or empty; and the file, or None.
    """
    spec = canonical_backbone(spec)
    name, colon, file = spec.partition(":")
    if colon and (file.endswith(SUFFIXES) or "/" in file):
        return name, Path(file).expanduser()
    if spec.endswith(SUFFIXES) or "/" in spec:
        return "", Path(spec).expanduser()
    return spec, None


def weights_to_download(spec: str) -> str:
    """Return the timm name of the weights that a run with this backbone must download.

    Args:
        spec: Name, file, or both.

    Returns:
        The name; empty if the weights are bundled, on this machine, or in a file.
    """
    name, path = split_spec(spec)
    if path is not None or name == BUNDLED_NAME or registered_backbone(name):
        return ""
    weights = full_name(name)
    return "" if weights_file(weights).is_file() or _in_cache(weights) else weights


def weights_file(name: str) -> Path:
    """Return the path at which ``fczoo bench --download`` stores the weights of a timm model.

    Args:
        name: Name of a timm model with its tag.
    """
    return home() / "weights" / f"{name}.safetensors"


def hub_repository(name: str) -> str:
    """Return the repository of a timm model's weights; QuickGELU is a variant of the same weights.

    Args:
        name: Name of a timm model with its tag.
    """
    return f"timm/{name.replace('_clip_quickgelu_', '_clip_')}"


def download_megabytes(name: str) -> int | None:
    """Return the approximate download size of a timm ViT, in MB; None if unknown.

    Args:
        name: Name of a timm model with its tag.
    """
    sizes, words = MEGABYTES_IN21K if name.endswith(".augreg_in21k") else MEGABYTES, name.split("_")
    return None if "plus" in words else next((sizes[w] for w in words if w in sizes), None)


def weights_needed(spec: str, option: str = "") -> str:
    """Describe how to get the weights of a backbone; empty if they are on this machine.

    Args:
        spec: Name, file, or both.
        option: Option of a command that downloads them. Default: the name of the backbone, which is
            sufficient from Python.
    """
    _, path = split_spec(spec)
    if path is not None:
        return "" if path.is_file() else f"the weight file {path} does not exist"
    missing = weights_to_download(spec)
    if not missing:
        return ""
    size, short = download_megabytes(missing), missing.partition(".")[0]
    spelling = short if full_name(short) == missing else missing
    download = (
        f"{option or f'--backbone {spelling}'} downloads them{f' ({size} MB)' if size else ''}"
    )
    return (
        f"the weights {missing} are not on this machine; {download}, --backbone FILE reads a copy"
    )


def _in_cache(name: str) -> bool:
    """Return whether the hub's client has the weights of a timm model in its cache."""
    from huggingface_hub import try_to_load_from_cache

    repository = hub_repository(name)
    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in HUB_FILES)


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
    unusual = {key: overlap for key, overlap in overlaps.items() if key not in IN_PAPERS}
    if unusual:
        titles, classes = _describe_sets(unusual)
        return f"backbone trained with labels of {classes}: {backbone} learned from {titles}"
    if overlaps:
        titles, classes = _describe_sets(overlaps)
        return f"{titles} weights saw images of {classes} in pre-training, as in the papers"
    return ""


def _describe_sets(shared: Mapping[str, str]) -> tuple[str, str]:
    """Return the titles of the pre-training sets and the largest overlap with one of them."""
    largest = next(words for overlap, words in CLASSES.items() if overlap in shared.values())
    return " and ".join(TITLES[key] for key in shared), largest
