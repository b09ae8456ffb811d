"""``fczoo predict``, ``evaluate`` and ``cite``: use of kept models."""

from collections.abc import Iterable
from pathlib import Path


def kept_models(folders: Iterable[Path]) -> str:
    """Return a line on the models in run folders and their size; empty without any.

    Args:
        folders: Run folders.
    """
    from fczoo.models.keep import models_in

    places, size = models_in(folders)
    if not places:
        return ""
    noun = "1 model" if len(places) == 1 else f"{len(places)} models"
    return f"\n{noun}, {size / 1e6:.1f} MB; use one with: fczoo predict {places[0]} IMAGE"
