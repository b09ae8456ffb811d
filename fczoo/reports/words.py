"""Values and settings in words."""

from typing import Any

from tabulate import tabulate


def word(value: Any) -> str:
    """An option's value as ``--set`` takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(word, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def said(name: str, value: Any) -> str:
    """A setting's value in words."""
    if value is None:
        return "natural" if name == "class_order_seed" else "all" if name.endswith("_per_class") else "none"
    return word(value)


def table(rows: list[tuple[Any, ...]], head: list[str]) -> str:
    """Plain table whose last column is wrapped."""
    return tabulate(
        rows, head, tablefmt="simple", disable_numparse=True, maxcolwidths=[*[None] * (len(head) - 1), 80]
    )


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(plain, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
