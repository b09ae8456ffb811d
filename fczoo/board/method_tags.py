"""Tags of a method from its registration and its runs, by which a page filters its rows."""

import dataclasses
from collections.abc import Iterable

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.reports.runs import Line

UNKNOWN = "not installed here"
NETWORK = "whole network"
TENSOR_KINDS = {
    "full": NETWORK,
    "lora": "LoRA",
    "prefix": "prompts",
    "general": "prompts",
    "expert": "prompts",
    "component": "prompts",
    "pool": "prompts",
    "common": "prompts",
    "prompt": "prompts",
    "adapter": "adapters",
    "head": "head",
    "proxy": "head",
    "eta": "head",
    "sigma": "head",
    "fusion": "head",
    "prototype": "prototypes",
    "tab": "task tokens",
    "new": "task tokens",
    "old": "task tokens",
}
"""First word of a trained tensor's name -> its kind; another word is its own kind."""
FAMILIES = (NETWORK, "LoRA", "prompts", "adapters", "prototypes", "head")
"""Kinds of trained tensors; the first of them that a method has names its family."""


def tags_of(line: Line) -> dict[str, tuple[str, ...]]:
    """Return the tags of a line's method with its options.

    Args:
        line: Row of a table; unknown tags are ``UNKNOWN`` if its method is not installed.

    Returns:
        Tags by filter: family of the method, exemplars (kept or none), kinds of content sent in
        its uploads (as its runs counted them), kinds of trained tensors, and tuning (number of
        trials of ``fczoo tune`` behind its values).
    """
    uploads = [r.uploaded for r in line.results]
    upload_kinds = tuple(
        dict.fromkeys(content for c in uploads for content, size in c.items() if size)
    )
    efforts = dict.fromkeys(record.trials for record in line.records)
    tuning = tuple(f"{effort or 'no'} trials" for effort in efforts)
    method = _method(line)
    family = exemplars = UNKNOWN
    trained: tuple[str, ...] = (UNKNOWN,)
    if method is not None:
        training = method.training()
        trained = words_of(training.trained_prefixes) or ("nothing",)
        exemplars = "kept" if training.exemplars else "none"
        if not line.competes:
            family = "upper bound"
        elif training.exemplars:
            family = "exemplars"
        else:
            family = next((name for name in FAMILIES if name in trained), "statistics only")
    return {
        "family": (family,),
        "exemplars": (exemplars,),
        "sent": upload_kinds,
        "trained": trained,
        "tuning": tuning,
    }


def words_of(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of tensors with these prefixes, each once.

    Args:
        prefixes: Prefixes of tensor names, as in a method's ``training().trained_prefixes``.
    """
    words = [prefix.partition(".")[0].partition("_")[0] for prefix in prefixes]
    return tuple(dict.fromkeys(TENSOR_KINDS.get(prefix_word, prefix_word) for prefix_word in words))


def _method(line: Line) -> Method | None:
    """Create the method of a run; None if its plug-in is missing or its options are outdated."""
    name, options = line.records[0].method, line.results[0].options
    if name not in METHODS.names():
        return None
    cls = METHODS.get(name)
    field_names = {f.name for f in dataclasses.fields(cls)}
    try:
        return build(cls, name, {k: v for k, v in options.items() if k in field_names})
    except FczooError:
        return None
