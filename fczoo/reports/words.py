"""Values of options and settings in words, and plain tables of words."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def option_word(value: Any) -> str:
    """An option's value as ``--set`` takes it: ``none``, ``true``, ``0.5``, ``1``, ``0,1,2``."""
    if isinstance(value, list | tuple):
        return ",".join(map(option_word, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def setting_word(name: str, value: Any) -> str:
    """A setting's value as a reader understands it; what ``none`` means depends on the setting."""
    if value is None and name == "class_order_seed":
        return "natural"
    if value is None and name.endswith("_per_class"):
        return "all"
    return option_word(value)


def columns() -> int | None:
    """Width of the terminal that the output goes to, if it goes to one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plain_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows in columns, without a heading."""
    from tabulate import tabulate  # here, since a shell that completes a word waits for this module

    return tabulate(rows, tablefmt="plain")


def word_table(rows: list[tuple[Any, ...]], head: list[str]) -> str:
    """A plain table whose last column is wrapped, and one of whole sentences beside it."""
    from tabulate import tabulate

    widths = [*[80 if name == "what it does" else None for name in head[:-1]], 80]
    return tabulate(rows, head, tablefmt="simple", disable_numparse=True, maxcolwidths=widths)
