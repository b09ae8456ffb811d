"""Test the handbook: it builds without warnings, has all pages, and its tutorials work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fczoo.core.registry import METHODS
from helpers_browser import needs_browser, serve_site
from helpers_warm import warm_commands

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = Path(__file__).with_name("plugin")
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
FILE = re.compile(r"```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)```", flags=re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)```", flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the handbook with warnings as errors."""
    for package in ("sphinx", "myst_parser", "myst_nb", "furo", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} (extra docs) is not installed")
    folder = tmp_path_factory.mktemp("handbook") / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    return folder


@pytest.mark.slow
def test_every_method_has_page_with_figure_and_formulas(site: Path) -> None:
    pages = {
        page.stem: page.read_text() for page in (site / "generated" / "methods").glob("*.html")
    }
    names = {*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")}
    assert pages.keys() >= names
    assert "orthogonal" in pages["pilora"]
    assert pages["pilora"].count("<math") > 3
    formulas = [
        formula for text in pages.values() for formula in re.findall(r"<math.*?</math>", text)
    ]
    assert not [formula for formula in formulas if "\\" in formula]  # LaTeX that was not understood
    for name in names:
        assert f"<title>What {name} trains and sends</title>" in pages[name]
    (row,) = re.findall(
        r"<tr[^>]*>(?:(?!</tr>).)*digits, 5 tasks(?:(?!</tr>).)*</tr>", pages["hgp"], re.DOTALL
    )
    assert "50.0 ± 4.2" in row and "64.4 ± 4.4" in row  # as results/digits.md has the means


@pytest.mark.slow
def test_handbook_loads_no_external_resources(site: Path) -> None:
    pattern = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*"
    )
    for page in site.rglob("*.html"):
        assert not pattern.findall(page.read_text(encoding="utf-8")), page


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_method_page_fits_phone_screen(site: Path, tmp_path: Path) -> None:
    """Show figure and formulas within 390 pixels."""
    script = """
        const box = selector => document.querySelector(selector).getBoundingClientRect();
        const width = document.documentElement.scrollWidth;
        return [width, box("svg[role=img]").width, box("math").height];
    """
    with serve_site(site, tmp_path / "profile") as pages:
        width, figure, formula = pages.ask("generated/methods/pilora.html", script)
        files_exist = [
            (site / path.lstrip("/").partition("?")[0]).exists() for path in pages.asked[1:]
        ]
        assert all(files_exist), pages.asked
        assert pages.ask("metrics.html", "return document.documentElement.scrollWidth") <= 390
    assert width <= 390
    assert 300 < figure < 390
    assert formula > 20


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_options_and_code_fit_phone_screen(site: Path, tmp_path: Path) -> None:
    """Show every meaning of an option and every comment behind a command on the screen."""
    meaning = """
        const cells = [...document.querySelectorAll("#options td:last-child")];
        return [cells.length, Math.max(...cells.map(cell => cell.getBoundingClientRect().right))];
    """
    cut = """
        const blocks = [...document.querySelectorAll(".highlight pre")];
        return [blocks.length, blocks.filter(pre => pre.scrollWidth > pre.clientWidth + 1).length];
    """
    with serve_site(site, tmp_path / "profile") as pages:
        count, right = pages.ask("generated/methods/pilora.html", meaning)
        blocks, wide = pages.ask("tables.html", cut)
    assert count > 10 and right <= 390
    assert blocks >= 2 and wide == 0


WIDTHS = """
    const found = {};
    for (const page of PAGES) {
      const frame = parent.document.createElement("iframe");
      frame.style = "width: WIDTHpx; height: 800px";
      const loaded = new Promise(done => { frame.onload = done; });
      frame.src = page;
      parent.document.body.append(frame);
      await loaded;
      const blocks = [...frame.contentDocument.querySelectorAll(".highlight pre")];
      const cut = blocks.filter(pre => pre.scrollWidth > pre.clientWidth + 1).length;
      found[page] = [frame.contentDocument.documentElement.scrollWidth, cut];
      frame.remove();
    }
    return found;
"""
"""Width of each page in a frame, and its blocks of code that are cut."""


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_and_code_fit_screen_width(site: Path, tmp_path: Path, width: int) -> None:
    names = [page.relative_to(site).as_posix() for page in sorted(site.rglob("*.html"))]
    names = [name for name in names if not name.startswith("_")]
    assert len(names) > 100
    script = WIDTHS.replace("PAGES", json.dumps([f"/{name}" for name in names]))
    with serve_site(site, tmp_path / "profile") as pages:
        found = pages.ask("index.html", script.replace("WIDTH", str(width)))
    assert len(found) == len(names)
    assert not {page: wide for page, (wide, _) in found.items() if wide > width}
    assert not {page: cut for page, (_, cut) in found.items() if cut}


@pytest.mark.slow
def test_every_option_has_anchor(site: Path) -> None:
    """Give each heading of an option an address."""
    headings = re.findall(r"^### (.*)$", (DOCS / "commands.md").read_text(), flags=re.MULTILINE)
    text = (site / "commands.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'<section id="([^"]+)"', text))
    assert len(headings) > 150
    for heading in headings:
        assert re.sub(r"[^a-z0-9]+", "-", heading.lower()) in ids, heading
        assert f">{heading}<" in text, heading  # with both hyphens


SEARCH = """
    const summary = () => document.querySelector(".search-summary")?.textContent || "";
    for (let i = 0; i < 100 && !summary().includes("finished"); i++)
      await fetch("/search.html").then(() => new Promise(done => setTimeout(done, 20)));
    return [...document.querySelectorAll("#search-results li a")].map(a => a.getAttribute("href"));
"""
"""Addresses that a search finds, best first. Each wait fetches a page, as timers of this browser
run ahead of the work."""


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("--train-per-class", "commands.html#index-"),
        ("drop-rate", "commands.html#index-"),
        ("already+in+use+by+another+configuration", "troubleshooting.html#index-"),
        ("no+class+folders+in", "troubleshooting.html#index-"),
    ],
)
def test_search_finds_options_and_messages(
    site: Path, tmp_path: Path, words: str, address: str
) -> None:
    with serve_site(site, tmp_path / "profile") as pages:
        found = pages.ask(f"search.html?q={words}", SEARCH)
    assert found[0].startswith(address), found[:5]


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_commands_work(page: Path, tmp_path: Path) -> None:
    """Write the files of a tutorial and run its commands in order, in an empty folder."""
    text = page.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    site = tmp_path / "site"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(
            [str(warm_commands()), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "FCZOO_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(site),
        "PIP_TARGET": str(site),  # packages of a tutorial go there, and fetch nothing
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as --no-build-isolation
    }
    script = "\n".join(COMMANDS.findall(text))
    assert script, "a tutorial without commands"
    command = ["bash", "-euxo", "pipefail", "-c", script]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_method_tutorial_matches_test_plugin():
    blocks = dict(FILE.findall((DOCS / "tutorials" / "method.md").read_text(encoding="utf-8")))
    files = {Path(name).name: content for name, content in blocks.items()}
    assert files == {path.name: path.read_text(encoding="utf-8") for path in PLUGIN.glob("*.*")}
    assert sum(text.count("\n") for text in files.values()) < 65
