"""The handbook: ``sphinx-build -W -b html docs docs/_build``. Nothing is fetched."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import links
import pages

import fczoo

project = "fczoo"
author = "fczoo developers"
release = version = fczoo.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests execute notebooks, which have no outputs

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_preserve_defaults = True
python_display_short_literal_types = True

smartquotes = False  # they turn the two hyphens of an option into a dash

html_theme = "furo"
html_title = f"fczoo {release}"
html_static_path = ["static"]
html_css_files = ["handbook.css"]
html_show_sourcelink = False


OPTION = re.compile(r"^### fczoo .* (--\S+)$", flags=re.MULTILINE)
MESSAGE = re.compile(r"^- `(.+)`$", flags=re.MULTILINE)


def adapt_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Let links to sources and results lead to generated pages, and add entries of the index.

    The search puts entries of the index first, so it finds options and messages. The contents next
    to the page of commands list commands only.
    """
    if name.startswith("generated/"):
        return
    text = links.link_to_generated(content[0], (Path(app.srcdir) / name).parent)
    if name == "commands":
        text = OPTION.sub(lambda match: f"{index_entry(match[1])}\n\n{match[0]}", text)
        text = f"---\ntocdepth: 2\n---\n{text}"
    if name == "troubleshooting":
        text = MESSAGE.sub(lambda match: f"{message_entries(match[1])}\n\n{match[0]}", text)
    content[0] = text


def message_entries(message: str) -> str:
    """Return entries for the parts of a message between names and numbers.

    Args:
        message: The message, with ``...`` for names and numbers.
    """
    parts = [part.strip(" ,:;?'") for part in message.split("...")]
    return "\n\n".join(index_entry(part) for part in parts if part.count(" ") > 1)


def index_entry(words: str) -> str:
    """Return an entry of the index in Markdown.

    Args:
        words: Words of the entry; a semicolon would divide it.
    """
    return f"```{{index}} ! single: {words.replace(';', ',')}\n```"


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for sources."""
    pages.write(Path(app.srcdir) / "generated")
    app.connect("source-read", adapt_page)
