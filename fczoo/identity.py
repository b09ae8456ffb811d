"""Hashes by which a run knows that its code and its data are still the same."""

import hashlib
import importlib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from .data import Stream
from .registry import DATASETS, METHODS, PLUGINS, load_plugins

BLOCK = 1024  # images that are hashed at once, so that a data set on disk need not fit into memory


@cache
def code_sha256() -> str:
    """Hash of every Python file of fczoo and of the installed plug-ins' modules, wherever they lie."""
    load_plugins()
    modules = {"fczoo", *METHODS.packages, *DATASETS.packages, *(entry.module for entry in entry_points(group=PLUGINS))}
    sources = {}
    for module in modules:
        place = Path(importlib.import_module(module).__file__ or "")
        if place.name != "__init__.py":
            sources[module] = place
            continue
        for file in place.parent.rglob("*.py"):  # an installation keeps methods/ inside fczoo/, a checkout beside it
            sources[".".join((module, *file.relative_to(place.parent).with_suffix("").parts))] = file
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\n".encode() + sources[name].read_bytes())
    return digest.hexdigest()


def data_sha256(stream: Stream) -> str:
    """Hash of the images and labels of both splits, as the run uses them."""
    digest = hashlib.sha256()
    for images in (stream.train, stream.test):
        digest.update(f"{images.pixels.shape}".encode() + images.labels.tobytes())
        for start in range(0, len(images.labels), BLOCK):
            digest.update(images.pixels[start : start + BLOCK].tobytes())
    return digest.hexdigest()
