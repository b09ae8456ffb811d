"""Values of options and settings in words, and plain tables of words."""

import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from fczoo.core.streams import is_terminal

SENTENCE = 80  # columns of a cell that holds a sentence, at most
GAP = 2  # blanks between two columns of a plain table


def option_word(value: Any) -> str:
    """An option's value as ``--set`` takes it: ``none``, ``true``, ``0.5``, ``1``, ``0,1,2``."""
    if isinstance(value, list | tuple):
        return ",".join(map(option_word, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def early_tasks(count: int) -> str:
    """The tasks of a trial of ``fczoo tune``."""
    return "the first task" if count == 1 else f"the first {count} tasks"


def setting_word(name: str, value: Any) -> str:
    """A setting's value as a reader understands it; what ``none`` means depends on the setting."""
    if value is None and name == "class_order_seed":
        return "natural"
    if value is None and name.endswith("_per_class"):
        return "all"
    return option_word(value)


def columns() -> int | None:
    """Width of the terminal that the output goes to, if it goes to one."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def plain_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows in columns, without a heading."""
    from tabulate import tabulate  # here, since a shell that completes a word waits for this module

    return tabulate(rows, tablefmt="plain")


def word_table(rows: list[tuple[Any, ...]], head: list[str]) -> str:
    """A plain table with sentences wrapped; other cells too, between words, where a terminal is narrower."""
    from tabulate import tabulate

    columned = [[str(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    words = [max(len(word) for cell in column for word in [*cell.split(), " "]) for column in columned]
    widths = [max(len(line) for cell in column for line in [*cell.splitlines(), ""]) for column in columned]
    sentences = {len(head) - 1, *(i for i, name in enumerate(head) if name == "what it does")}
    widths = [min(width, SENTENCE) if i in sentences else width for i, width in enumerate(widths)]

    def spare(place: int) -> float:
        """What a column can best do without: a sentence keeps twice the room of anything else."""
        return widths[place] / (2 if place in sentences else 1)

    over = sum(widths) + GAP * (len(widths) - 1) - (columns() or math.inf)
    while over > 0 and (wide := [i for i, width in enumerate(widths) if width > words[i]]):
        widths[max(wide, key=spare)] -= 1
        over -= 1
    broken = [[_broken(cell, width) for cell in c] for c, width in zip(columned, widths, strict=True)]
    first, *rest = zip(*broken, strict=True)
    return tabulate(rest, first, tablefmt="simple", disable_numparse=True)


def _broken(text: str, width: int) -> str:
    """Lines of some columns, by words: tabulate's own wrapping takes 5,130 for a number and fails."""
    wrapper = textwrap.TextWrapper(max(width, 1), break_long_words=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
