"""Match names without regard to case, ``-`` and ``_``."""

from collections.abc import Iterable


def fold(name: str) -> str:
    """Return a name in the form in which names are compared: ``Tiny-ImageNet`` -> ``tinyimagenet``."""
    return name.lower().replace("-", "").replace("_", "")


def match(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a word spells, None for none. The exact spelling wins."""
    known = list(names)
    if word in known:
        return word
    return next((name for name in known if fold(name) == fold(word)), None)
