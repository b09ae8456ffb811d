"""Names: matches without regard to case, ``-`` and ``_``, and lists of them in messages."""

from collections.abc import Iterable, Sequence


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


def join_first_names(names: Sequence[str], limit: int = 5, separator: str = ", ") -> str:
    """Join the first names, followed by the number of others: ``a, b and 3 more``.

    Args:
        names: All names.
        limit: Largest number of names in the result.
        separator: Text between two names.
    """
    remainder = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + remainder


def shorten_list(names: Sequence[str], limit: int) -> str:
    """Join the first names, with dots if there are more: ``a, b, ...``.

    Args:
        names: All names.
        limit: Largest number of names in the result.
    """
    return ", ".join([*names[:limit], *(["..."] if len(names) > limit else [])])
