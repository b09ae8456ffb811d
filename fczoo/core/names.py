"""Match names without regard to case, ``-`` and ``_``."""

from collections.abc import Iterable


def fold(name: str) -> str:
    """Return a name in the form in which names are compared.

    For example ``Tiny-ImageNet`` becomes ``tinyimagenet``.

    Args:
        name: Name in any spelling.
    """
    return name.lower().replace("-", "").replace("_", "")


def match(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a word spells. The exact spelling takes precedence.

    Args:
        word: Name in the user's spelling.
        names: Known names.

    Returns:
        The known name; None if there is none.
    """
    candidates = list(names)
    if word in candidates:
        return word
    return next((name for name in candidates if fold(name) == fold(word)), None)
