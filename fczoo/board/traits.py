"""What a method is, as its registration and its runs tell: the words by which a page filters its rows."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.reports.runs import Line

UNKNOWN = "not installed here"
NETWORK = "whole network"
TRAINED = {
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
"""The first word of what clients train -> what it is; another word stands for itself."""
FAMILIES = (NETWORK, "LoRA", "prompts", "adapters", "prototypes", "head")
"""Of what a method trains, the first of these names its family."""


@dataclass(frozen=True)
class Traits:
    """One row's words."""

    family: str
    exemplars: str  # kept or none
    sent: tuple[str, ...]  # kinds of content in its uploads, as its runs counted them
    trained: tuple[str, ...]
    tuning: tuple[str, ...]  # with how many trials of ``fczoo tune`` its values were found

    def words(self) -> dict[str, tuple[str, ...]]:
        """The words under which a row is found, by filter."""
        return {
            "family": (self.family,),
            "exemplars": (self.exemplars,),
            "sent": self.sent,
            "trained": self.trained,
            "tuning": self.tuning,
        }


def traits(line: Line) -> Traits:
    """What the method of a line is with that line's options."""
    counted = [r.uploaded for r in line.results]
    sent = tuple(dict.fromkeys(content for c in counted for content, size in c.items() if size))
    efforts = dict.fromkeys(cell.trials for cell in line.cells)
    tuning = tuple(f"{effort or 'no'} trials" for effort in efforts)
    method = _method(line)
    if method is None:
        return Traits(UNKNOWN, UNKNOWN, sent, (UNKNOWN,), tuning)
    training = method.training()
    trained = words_of(training.trained)
    if not line.competes:
        family = "upper bound"
    elif training.exemplars:
        family = "exemplars"
    else:
        family = next((name for name in FAMILIES if name in trained), "statistics alone")
    exemplars = "kept" if training.exemplars else "none"
    return Traits(family, exemplars, sent, trained or ("nothing",), tuning)


def words_of(prefixes: Iterable[str]) -> tuple[str, ...]:
    """What tensors with these prefixes are, each word once."""
    words = [prefix.partition(".")[0].partition("_")[0] for prefix in prefixes]
    return tuple(dict.fromkeys(TRAINED.get(word, word) for word in words))


def _method(line: Line) -> Method | None:
    """The method as it ran; None for a plug-in that is not installed, and for values it no longer takes."""
    name, options = line.cells[0].method, line.results[0].options
    if name not in METHODS.names():
        return None
    cls = METHODS.get(name)
    known = {f.name for f in dataclasses.fields(cls)}
    try:
        return build(cls, name, {k: v for k, v in options.items() if k in known})
    except FczooError:
        return None
