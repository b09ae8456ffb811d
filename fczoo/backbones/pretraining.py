"""Pre-training data of backbones. Importing this module loads neither torch nor timm."""

import re

from fczoo.backbones.names import BUNDLED_NAME, full_name
from fczoo.backbones.weights import split_spec

TITLES = {"tinyimagenet": "Tiny-ImageNet", "imagenet1k": "ImageNet-1k", "imagenet21k": "ImageNet-21k"}
"""Pre-training sets, by the names under which data sets declare the classes that they share."""

IN_PAPERS = frozenset({"imagenet1k", "imagenet21k"})
"""Pre-training sets that the papers of the field use."""

SUPERSETS = {"imagenet21k": "imagenet1k"}
"""Pre-training sets that contain all classes of another one."""

_HASHES = {  # SHA-256 of weight files
    "3ffadaa2e488f0de67e1f4459d5a303deca3de69e44e52619c0b0848d99d5c14": BUNDLED_NAME,
    "38ed24e369e115a1b0308dbaa97ebbf5bf6a51cb03717d9851e4070514df6016": (
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    ),
}
_TAGGED = re.compile(r"(?:vit|deit3?)_\w+\.(\w+)")
_IN_TAG = {"in21k": "imagenet21k", "in22k": "imagenet21k", "in12k": "imagenet21k", "in1k": "imagenet1k"}
_UNLABELLED = frozenset({"dino", "mae"})  # tags of weights trained on images of ImageNet-1k


def pretraining_sets(name: str) -> tuple[str, ...]:
    """Return the sets on which a named backbone was trained; empty where they are not known.

    A timm name without a tag is an architecture, not weights: see ``full_name``.
    """
    if name == BUNDLED_NAME:
        return ("tinyimagenet",)
    tagged = _TAGGED.fullmatch(name)
    if tagged is None:
        return ()
    words = tagged[1].split("_")
    if words[0] in _UNLABELLED:
        return ("imagenet1k",)
    return tuple(dict.fromkeys(_IN_TAG[word] for word in words if word in _IN_TAG))


def describe_pretraining(name: str) -> str:
    """Describe the data that a named backbone was trained on."""
    sets = pretraining_sets(name)
    return " and ".join(TITLES[key] for key in sets) if sets else "not known"


def identify_weights(spec: str, sha256: str = "") -> str:
    """Return the bundled or timm name of the weights behind ``--backbone``; empty for unknown weights.

    A file is recognized by its hash, its file name, or the timm name with a tag given beside it.
    """
    if sha256 in _HASHES:
        return _HASHES[sha256]
    given, file = split_spec(spec)
    beside = "" if given == BUNDLED_NAME else given  # NAME:FILE; its architecture has no other name
    names = [full_name(given)] if file is None else [file.stem, beside]
    return next((name for name in names if pretraining_sets(name)), "")
