"""The handbook: ``sphinx-build -W -b html docs docs/_build``. Nothing is fetched."""

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

html_theme = "furo"
html_title = f"fczoo {release}"
html_static_path = ["static"]
html_css_files = ["handbook.css"]
html_show_sourcelink = False


LONG_PAGES = ("commands",)
"""Pages whose contents next to the text list sections only, not each option."""


def adapt_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Let links to sources and results lead to generated pages, and shorten long contents."""
    if not name.startswith("generated/"):
        content[0] = links.link_to_generated(content[0], (Path(app.srcdir) / name).parent)
    if name in LONG_PAGES:
        content[0] = f"---\ntocdepth: 2\n---\n{content[0]}"


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for sources."""
    pages.write(Path(app.srcdir) / "generated")
    app.connect("source-read", adapt_page)
