"""Test that links of the pages lead to files and sections of the repository."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "docs/tutorials", "docs/notebooks", "results", "benchmarks")
GENERATED_FOLDERS = (ROOT / "docs" / "generated", ROOT / "docs" / "_build")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)\s]+)\)")
BLOCK = re.compile(r"^(```|~~~~).*?^\1", flags=re.DOTALL | re.MULTILINE)
Import = Callable[[str], ModuleType]


def pages() -> list[Path]:
    """Return all pages and notebooks of the repository."""
    folders = [ROOT, *(ROOT / folder for folder in FOLDERS)]
    return sorted(page for f in folders for kind in ("*.md", "*.ipynb") for page in f.glob(kind))


def text_of(page: Path) -> str:
    """Return the Markdown of a page or a notebook, without blocks of code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return BLOCK.sub("", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and the handbook write them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_have_targets(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), link
        assert not any(file.is_relative_to(folder) for folder in GENERATED_FOLDERS), link
        assert not anchor or anchor in anchors(file), link


def test_pages_link_to_generated_pages() -> None:
    text = "".join(text_of(page) for page in pages())
    for name in ("methods.md", "commands.md", "settings.md", "result.md", "fczoo/__init__.pyi"):
        assert f"{name})" in text, name


@pytest.mark.parametrize(
    ("folder", "link", "generated"),
    [
        ("docs", "../methods/pilora.py", "generated/methods/pilora.md"),
        ("docs/tutorials", "../../baselines/ewc.py", "../generated/methods/ewc.md"),
        ("docs/tutorials", "../../fczoo/__init__.pyi", "../generated/api.md"),
        ("docs", "../fczoo/functional", "generated/blocks.md"),
        ("docs", "../results/README.md", "generated/results/README.md"),
        ("docs", "metrics.md#diagnostics", "metrics.md#diagnostics"),
        ("docs", "https://example.org/methods/pilora.py", "https://example.org/methods/pilora.py"),
        ("docs", "#methods", "#methods"),
    ],
)
def test_handbook_links_lead_to_generated_pages(
    folder: str, link: str, generated: str, docs_module: Import
) -> None:
    text = docs_module("links").link_to_generated(f"a [b]({link}) c", ROOT / folder)
    assert text == f"a [b]({generated}) c"
