"""Formulas as MathML, which browsers draw themselves: no script, no fonts, nothing fetched."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    formula = convert(node.astext(), display="block")
    writer.body.append(f'<div style="overflow: auto hidden; padding: 0.6em 0">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
