"""fczoo: a benchmark zoo for Federated Class-Incremental Learning on vision transformers."""

import warnings
from typing import Any

import lazy_loader

__version__ = "0.3.0.dev0"

# Each name is imported when it is first used.
_get_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_NEW_NAMES = {"Bench": "Benchmark", "Silent": "Callback", "whole": "whole_tensors"}
"""Old and new names. The old ones work and warn."""


def __getattr__(name: str) -> Any:
    if name in _NEW_NAMES:
        new = _NEW_NAMES[name]
        message = f"fczoo.{name} is now fczoo.{new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = new
    return _get_attribute(name)
