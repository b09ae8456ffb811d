"""Text of option and setting values, and tables of text."""

import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fczoo.core.options import nearest
from fczoo.core.terminal import is_terminal

SENTENCE_WIDTH = 80  # largest width of a cell with a sentence
GAP = 2  # blanks between two columns of a plain table


def option_word(value: Any) -> str:
    """Format an option's value as for ``--set``: ``none``, ``true``, ``0.5``, ``1``, ``0,1,2``.

    Args:
        value: Value, or a list or tuple of values.
    """
    if isinstance(value, list | tuple):
        return ",".join(map(option_word, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def nearest_or_advice(word: str, names: Collection[str], advice: str) -> str:
    """Return similar names of an unknown name, or other advice if none is similar.

    With hundreds of names, the list that ``nearest`` returns instead would not help.

    Args:
        word: Unknown name.
        names: Known names.
        advice: Advice without similar names.
    """
    similar_names = nearest(word, names)
    return similar_names if similar_names.startswith("did you mean") else advice


def short_name(axis: str) -> str:
    """Return the name of an option without its method.

    Args:
        axis: Name of a setting, or METHOD.OPTION.
    """
    return axis.partition(".")[2] or axis


def sweep_word(values: Sequence[Any]) -> str:
    """Format values as for ``--sweep``; lists are in parentheses: ``(0,1),(0,1,2)``.

    Args:
        values: Values of an option.
    """
    words = map(option_word, values)
    return ",".join(f"({w})" if "," in w and not w.startswith("(") else w for w in words)


def early_tasks(count: int) -> str:
    """Describe the tasks of a trial of ``fczoo tune``."""
    return "the first task" if count == 1 else f"the first {count} tasks"


def setting_word(name: str, value: Any) -> str:
    """Format a setting's value for readers; the meaning of ``none`` depends on the setting.

    Args:
        name: Field of ``Settings``.
        value: Its value.
    """
    if value is None and name == "class_order_seed":
        return "natural"
    if value is None and name.endswith("_per_class"):
        return "all"
    return option_word(value)


def columns() -> int | None:
    """Return the width of the terminal, or None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def plain_table(rows: Iterable[Sequence[str]]) -> str:
    """Format rows in columns, without a heading."""
    from tabulate import tabulate  # late: shell completion waits for the import of this module

    return tabulate(rows, tablefmt="plain")


def word_table(rows: list[tuple[Any, ...]], head: list[str]) -> str:
    """Format a table with wrapped sentences; on a narrow terminal all cells wrap at words.

    Args:
        rows: Cells of each row.
        head: Names of the columns; the last one and ``what it does`` contain sentences.
    """
    from tabulate import tabulate

    cell_columns = [[str(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    min_widths = [
        max(len(token) for cell in column for token in [*cell.split(), " "])
        for column in cell_columns
    ]
    widths = [
        max(len(line) for cell in column for line in [*cell.splitlines(), ""])
        for column in cell_columns
    ]
    sentences = {len(head) - 1, *(i for i, name in enumerate(head) if name == "what it does")}
    widths = [
        min(width, SENTENCE_WIDTH) if i in sentences else width for i, width in enumerate(widths)
    ]

    def shrink_priority(place: int) -> float:
        """Return a column's priority for shrinking; sentences keep twice the width of others."""
        return widths[place] / (2 if place in sentences else 1)

    excess = sum(widths) + GAP * (len(widths) - 1) - (columns() or math.inf)
    while excess > 0 and (wide := [i for i, width in enumerate(widths) if width > min_widths[i]]):
        widths[max(wide, key=shrink_priority)] -= 1
        excess -= 1
    wrapped_columns = [
        [_wrap(cell, width) for cell in c] for c, width in zip(cell_columns, widths, strict=True)
    ]
    first, *body = zip(*wrapped_columns, strict=True)
    return tabulate(body, first, tablefmt="simple", disable_numparse=True)


def _wrap(text: str, width: int) -> str:
    """Wrap a cell at words; tabulate would treat 5,130 as a number and fail."""
    wrapper = textwrap.TextWrapper(max(width, 1), break_long_words=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
