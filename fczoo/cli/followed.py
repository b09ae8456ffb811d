"""The protocol that is followed where none is named."""

from collections.abc import Mapping
from typing import Any

from fczoo.core.registry import DATASETS


def followed_here(dataset: str, given: Mapping[str, Any], elsewhere: bool = False) -> dict[str, str]:
    """Without a GPU, and where nothing is said of a protocol, ``quick``: other schedules take days there.

    Digits have it as their own. ``elsewhere``: on nodes, and what those have this machine does not know.
    """
    if DATASETS.get(dataset).name == "digits" or given.keys() & {"protocol", "as_released"}:
        return {}
    from fczoo.federation.device import pick_device  # imports torch

    device = given.get("device", "auto")
    slow = device == "cpu" or (device == "auto" and pick_device("auto").type == "cpu")
    return {"protocol": "quick"} if slow and not elsewhere else {}
