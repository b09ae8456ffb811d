"""Links of the handbook that also work on a code host.

Pages in the repository link to files in the repository. The handbook replaces some of these files
by pages that it generates, so links to them change as it is built.
"""

import os
import re
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
PLACES = {
    ROOT / "fczoo" / "__init__.pyi": "generated/api.md",
    ROOT / "fczoo" / "functional": "generated/blocks.md",
}
"""File or folder -> the generated page about it."""


def link_to_generated(text: str, folder: Path) -> str:
    """Return a page whose links to sources and results lead to the handbook's own pages.

    Args:
        text: Markdown with links relative to ``folder``.
        folder: Folder of the page.
    """

    def replacement(link: re.Match[str]) -> str:
        page = generated_page((folder / link[2]).resolve())
        return link[0] if page is None else f"{link[1]}{relative(DOCS / page, folder)}"

    return LINK.sub(replacement, text)


def generated_page(file: Path) -> str | None:
    """Return the generated page that replaces a file; None if none does.

    Args:
        file: File in the repository.
    """
    if file in PLACES:
        return PLACES[file]
    if file.suffix == ".py" and file.parent in (ROOT / "methods", ROOT / "baselines"):
        return f"generated/methods/{file.stem}.md"
    if file.suffix == ".md" and file.is_relative_to(ROOT / "results"):
        return f"generated/{file.relative_to(ROOT).as_posix()}"
    return None


def relative(file: Path, folder: Path) -> str:
    """Return the path of a file from a folder of the handbook, with slashes.

    Args:
        file: A file.
        folder: A folder, which need not contain it.
    """
    return Path(os.path.relpath(file, folder)).as_posix()
