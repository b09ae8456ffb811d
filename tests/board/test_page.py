"""The report page: content, no external requests, and rendering in a browser."""

import csv
import hashlib
import io
import json
import re
import sys
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.board.pages import write_page
from fczoo.cli.app import main
from fczoo.core.files import write_json
from helpers_browser import needs_browser, serve_site

HOSTILE = "<script>alert(1)</script>"
NAMES = ("accuracy", "forgetting", "bytes", "seconds", "partition", "loss", "time")


@pytest.fixture(scope="module")
def page(make_run, tmp_path_factory) -> Path:
    """Write the page of two experiments.

    The runs include an unfinished one and an option with markup.
    """
    root = tmp_path_factory.mktemp("page")
    make_run(
        root / "runs" / "a",
        {"one": {0: 70.0, 1: 72.0, 2: 74.0}, "two": {0: 60.0, 1: 80.0, 2: 50.0}},
    )
    make_run(root / "runs" / "b", {"three": {0: 40.0}}, {"note": HOSTILE}, rounds=9)
    write_json(
        root / "runs" / "a" / "two" / "seed2" / "failed.json", {"error": f"two diverged {HOSTILE}"}
    )
    return write_report(root / "runs", root / "page.html")


def write_report(runs: Path, out: Path, *words: str) -> Path:
    """Write the report page of some runs to ``out``; return ``out``."""
    outcome = CliRunner().invoke(main, ["report", str(runs), "--html", str(out), *words])
    assert outcome.exit_code == 0, outcome.output
    return out


class References(HTMLParser):
    """Collect the tags and references of a page that make a browser fetch or run something."""

    def __init__(self, text: str):
        super().__init__()
        self.urls: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.urls += [
            v or ""
            for k, v in attributes
            if k in ("src", "href", "xlink:href", "srcset", "action", "data", "poster")
            or k.startswith("on")
        ]
        self.urls += re.findall(r"url\(([^)]*)\)", " ".join(v or "" for _, v in attributes))


def test_page_has_no_external_references(page):
    text = page.read_text()
    references = References(text)
    assert references.urls, references.urls
    assert all(r.strip("'\"").startswith(("#", "data:")) for r in references.urls), references.urls
    assert not references.tags & {"iframe", "img", "object", "embed", "base"}
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert re.findall(r"url\((?!#)", text) == []
    assert set(re.findall(r'https?://[^\s"<)]+', text)) == {
        "http://www.w3.org/2000/svg"
    }  # a namespace, not an address


def test_page_allows_only_its_script(page):
    text = page.read_text()
    (digest,) = re.findall(r"script-src 'sha256-([^']+)'\"", text)
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts] == [
        digest
    ]
    assert len(re.findall("<script", text)) == 1 + 8  # one script, and the data of each chart


def test_markup_in_results_is_escaped(page):
    text = page.read_text()
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2


def test_figures_are_written_as_png_and_pdf(page):
    pytest.importorskip("matplotlib", reason="matplotlib (extra plot) is not installed")
    figures = page.parent / "figures"
    write_report(page.parent / "runs", page.parent / "again.html", "--figures", str(figures))
    for number, extra in (("1", ("matrix-one", "matrix-two")), ("2", ("matrix-three",))):
        assert {p.name for p in (figures / number).iterdir()} == {
            f"{n}.{end}" for n in (*NAMES, *extra) for end in ("png", "pdf")
        }
        assert all(
            p.read_bytes().startswith((b"\x89PNG", b"%PDF")) and p.stat().st_size > 3000
            for p in (figures / number).iterdir()
        )


def test_page_csv_has_all_values(page):
    contents = re.findall(r'href="data:text/csv;base64,([^"]+)"', page.read_text())
    figures, pairs, _ = (
        list(csv.DictReader(io.StringIO(b64decode(text).decode()))) for text in contents
    )
    assert [row["method"] for row in figures] == ["one", "two"]
    assert float(figures[0]["A_N"]) == 76.0
    assert float(figures[0]["A_N std"]) == 1.0
    assert [(row["method"], row["other"], row["seeds"]) for row in pairs] == [("one", "two", "2")]
    assert float(pairs[0]["difference"]) == 0.5  # only seeds 0 and 1: 75 - 70 and 76 - 80


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("rounds.jsonl", '{"loss": null}', ""),  # no participating client had data
        (
            "rounds.jsonl",
            '{"loss": "low"}',
            "rounds.jsonl is not a valid list of rounds: a round has no numeric loss",
        ),
        ("rounds.jsonl", '{"loss": 1', "rounds.jsonl is not a valid list of rounds"),
        (
            "diagnostics.jsonl",
            '{"kind": "confusion", "matrix": 7}',
            "diagnostics.jsonl is not a valid list of diagnostics",
        ),
        ("diagnostics.jsonl", "{}", "diagnostics.jsonl is not a valid list of diagnostics"),
    ],
)
def test_records_are_drawn_or_reported_as_invalid(name, line, says, make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"one": {0: 70.0}})
    with (folder / "one" / "seed0" / name).open("a") as file:
        file.write(f"{line}\n")
    outcome = CliRunner().invoke(
        main, ["report", str(folder), "--html", str(tmp_path / "page.html")]
    )
    assert (outcome.exit_code == 0) == (not says)
    assert says in outcome.output
    assert outcome.output.count("\n") == 1


def test_page_is_reproducible(page):
    assert (
        write_report(page.parent / "runs", page.parent / "again.html").read_text()
        == page.read_text()
    )


def test_resume_commands_are_not_listed(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"one": {0: 70.0}})
    long = ["fczoo", "bench", "--methods", "one", "--out", "my run"]
    earlier = [
        long,
        ["fczoo", "bench", "--resume", "--out", "my run"],
        [*long, "--jobs", "2", "--resume"],
    ]
    about = {**json.loads((folder / "bench.json").read_text()), "earlier_commands": earlier}
    write_json(folder / "bench.json", {**about, "command": [*long, "--accept-changed-code"]})
    out = tmp_path / "page.html"
    assert CliRunner().invoke(main, ["report", str(folder), "--html", str(out)]).exit_code == 0
    commands = re.findall(r"<pre>(.*?)</pre>", out.read_text())
    assert commands == ["fczoo bench --methods one --out &#39;my run&#39;"]


def test_only_figure_files_need_matplotlib(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = page.parent / "plain.html"
    assert write_report(page.parent / "runs", out).read_text() == page.read_text()
    words = [
        "report",
        str(page.parent / "runs"),
        "--html",
        str(out),
        "--figures",
        str(page.parent / "never"),
    ]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1
    assert outcome.stderr == "Error: figures need matplotlib; run pip install 'fczoo[plot]'\n"


MEASURE = """
    const plots = [...document.querySelectorAll(".plot svg")];
    const texts = plots.flatMap(svg => [...svg.querySelectorAll("text")]);
    return {
        wide: document.documentElement.scrollWidth,
        plots: plots.length,
        narrowest: Math.min(...plots.map(svg => svg.getBoundingClientRect().width)),
        smallest: Math.min(...texts.map(text => {
            const svg = text.ownerSVGElement;
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            return scale * parseFloat(window.getComputedStyle(text).fontSize);
        })),
        words: texts.map(text => text.textContent),
        cut: texts.filter(text => {
            const box = text.getBoundingClientRect();
            const svg = text.ownerSVGElement.getBoundingClientRect();
            return box.left < svg.left - 1 || box.right > svg.right + 1;
        }).map(text => text.textContent),
    };
"""


@pytest.mark.browser
@needs_browser
def test_browser_renders_page_without_other_requests(page, tmp_path):
    with serve_site(page.parent, tmp_path / "profile") as site:
        dom, picture = site.dom("page.html"), site.shot("page.html", tmp_path / "shot.png")
        assert set(site.asked) == {"/page.html"}
        assert site.complaints("page.html") == []
        measures = site.ask("page.html", MEASURE)
    assert measures["wide"] <= 390
    assert measures["plots"] == 8
    assert measures["cut"] == []
    assert {"0", "80", "1", "2", "→ tasks learned"} <= set(measures["words"])
    assert "-0" not in measures["words"]
    assert measures["narrowest"] > 330
    assert measures["smallest"] > 11  # as large as the text around them
    for words in (
        "digits, 2 tasks, 2 clients, iid",
        "76.0 ± 1.0",
        "73.5 to 78.5",  # 4.303 * 1 / sqrt(3)
        "accuracy over all classes seen, %",
        "not finished: two seed 2: two diverged",
        "fczoo bench --methods one,two",
    ):
        assert words in dom
    assert 'class="best"' in dom and "≈" in dom
    assert picture.shape[:2] == (2000, 500)
    assert len({tuple(p) for p in (picture[::4, ::4, :3] * 255).astype(int).reshape(-1, 3)}) > 30


def test_page_marks_untested_rows(make_run, tmp_path):
    make_run(tmp_path / "run", {"one": {0: 55.0, 1: 57.0}, "two": {0: 53.0, 1: 55.0}})
    write_page([tmp_path / "run"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert 'class="second">67.0 ± 0.7 †</td>' in text
    assert "† not tested against the best: fewer than two shared seeds" in text
