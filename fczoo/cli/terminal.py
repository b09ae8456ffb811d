"""Text on a terminal."""

import textwrap

from fczoo.reports.words import columns


def fitted(text: str) -> str:
    """The text with sentences broken at words, where it goes to a terminal; rows of tables stay whole."""
    width = columns()
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)  # names of files
    return "\n".join(
        line if "  " in line or len(line) <= width else wrapper.fill(line) for line in text.splitlines()
    )
