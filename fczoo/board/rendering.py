"""From content to a page in a single file that fetches nothing and runs no script but its own."""

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fczoo import __version__
from fczoo.core.files import encode_json

GENERATOR = "fczoo board"
SCRIPTS = ("charts.js", "board.js")


def asset(name: str) -> str:
    """A file that pages are made of."""
    return (files("fczoo.assets") / "board" / name).read_text(encoding="utf-8")


def render(template: str, **content: Any) -> str:
    """The page. Its policy names the hash of its script, so that nothing else in it can run."""
    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["data"] = as_data
    script = "\n".join(map(asset, SCRIPTS))
    page = environment.get_template(template).render(
        style=Markup(asset("board.css")),
        script=Markup(script),
        script_sha256=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
        generator=GENERATOR,
        version=__version__,
        **content,
    )
    return f"{page.rstrip()}\n"


def as_data(content: Any) -> Markup:
    """JSON inside a script element, in which no text can end the element."""
    return Markup(encode_json(content, separators=(",", ":")).replace("<", "\\u003c"))
