"""``fczoo leaderboard``: text of the site, and sorting, filters and charts in a browser."""

import csv
import io
import re
from base64 import b64decode
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from helpers_browser import Site, cells, needs_browser, serve_site
from helpers_runs import tune

SCORES = {
    "hgp": 70.0,
    "codap": 68.0,
    "dualprompt": 67.0,
    "pilora": 65.0,
    "icarl": 60.0,
    "fedncm": 55.0,
    "fedavg": 50.0,
    "ewc": 45.0,
    "l2p": 40.0,
}
LEADERS = ["hgp", "codap", "pilora", "icarl", "fedncm", "fedavg"]
"""The best method of each of five families, and the next best one."""


def build_site(out: Path, *words: str) -> Path:
    """Build a leaderboard in ``out`` with these arguments of the command."""
    outcome = CliRunner().invoke(main, ["leaderboard", *words, "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    return out


@pytest.fixture(scope="module")
def site(make_run, tmp_path_factory) -> Path:
    """Build the site of three benchmarks.

    One has nine methods with three seeds, one has three with one seed, and one has a single method.
    """
    root = tmp_path_factory.mktemp("leaderboard")
    runs = root / "runs"
    scores = {name: {seed: last + seed for seed in range(3)} for name, last in SCORES.items()}
    scores["ewc"] = {
        0: 46.0,
        1: 45.0,
        2: 47.0,
    }  # its differences to other methods depend on the seed
    scores["l2p"] = {0: 40.0, 1: 42.0, 2: 41.0}
    make_run(runs / "a", scores)
    make_run(runs / "b", {"fedncm": {0: 80.0}, "hgp": {0: 30.0}, "ewc": {0: 30.0}}, rounds=9)
    make_run(runs / "c", {"l2p": {0: 80.0}}, rounds=7)
    return build_site(root / "site", str(runs))


def test_index_ranks_by_borda(site):
    """Rank the methods by their Borda shares.

    hgp: (8/8 + 0.5/2) / 2, fedncm: (3/8 + 2/2) / 2, ewc: (1/8 + 0.5/2) / 2. A method needs only
    one of the two benchmarks.
    """
    rows = [row[:7] for row in cells(site / "index.html", "ranks")]
    assert rows[:5] == [
        ["codap", "1", "87.5", "1", "2", "", "prompts"],
        ["dualprompt", "2", "75.0", "1", "3", "", "prompts"],
        ["fedncm", "3", "68.8", "2", "6", "1", "statistics only"],
        ["hgp", "4", "62.5", "2", "1", "2", "prompts"],
        ["pilora", "4", "62.5", "1", "4", "", "LoRA"],
    ]
    assert rows[7] == ["ewc", "8", "18.8", "2", "8", "2", "whole network"]
    sentence = "it needs at least 5 benchmarks that share 3 methods or more; benchmarks here: 2"
    assert sentence in (site / "index.html").read_text()


def test_only_tuned_rows_are_ranked_if_present(make_run, tmp_path):
    """Rank only tuned rows if some rows were tuned.

    Do not count PILoRA, which is best with default options, nor the benchmark without tuned rows.
    """
    tune(
        make_run(tmp_path / "runs" / "a", {"hgp": {0: 40.0}, "ewc": {0: 50.0}}), 12, ["hgp", "ewc"]
    )
    make_run(tmp_path / "runs" / "b", {"pilora": {0: 90.0}, "fedncm": {0: 20.0}})
    make_run(
        tmp_path / "runs" / "c", {"hgp": {0: 80.0}, "ewc": {0: 30.0}, "l2p": {0: 10.0}}, rounds=9
    )
    page = build_site(tmp_path / "site", str(tmp_path / "runs")) / "index.html"
    assert cells(page, "ranks") == [
        ["ewc", "1", "100.0", "1", "1", "whole network"],
        ["hgp", "2", "0.0", "1", "2", "prompts"],
    ]
    assert "Only rows whose values" in page.read_text()
    assert "7 runs of 5 methods in 2" in page.read_text()
    assert {row[3] for row in cells(page, "benchmarks")} == {
        "pilora, 85.0",
        "hgp, 80.0",
    }  # half of 90 and 80


def test_all_rows_are_ranked_without_tuning(site):
    assert "Only rows whose values" not in (site / "index.html").read_text()


def test_index_links_page_of_every_benchmark(site):
    text = (site / "index.html").read_text()
    pages = {path.name for path in site.iterdir()} - {"index.html"}
    assert len(pages) == 3
    assert pages == set(re.findall(r'href="(digits[^"]+)"', text))
    headings = [row[0] for row in cells(site / "index.html", "benchmarks")]
    words = "digits2 tasks, 2 clients, iid; vit_nano_32; {} rounds x 1 epochs per task, all images"
    assert headings == [f"#{i} {words.format(rounds)}" for i, rounds in ((1, 2), (2, 9), (3, 7))]
    first = next(site / name for name in pages if "-2x1-" in name)
    rows = cells(first, "methods")
    assert rows[0][:3] == ["hgp", "75.5 ± 0.5", "74.3 to 76.7"]  # half of 70, 71, 72 and 80
    assert [row[0] for row in rows] == list(SCORES)
    assert rows[0][-2:] == ["3", "prompts"]
    assert (first.read_text()).count("fczoo bench --methods") == len(SCORES)
    one_seed = next(site / name for name in pages if "-9x1-" in name).read_text()
    assert "one seed, so there is no interval" in one_seed
    assert "No pair of methods is tested" in one_seed


def test_precision_is_part_of_benchmark_name(make_run, tmp_path):
    for precision in ("fp32", "bf16"):
        make_run(tmp_path / "runs" / precision, {"l2p": {0: 80.0}}, precision=precision)
    rows = cells(build_site(tmp_path / "site", str(tmp_path / "runs")) / "index.html", "benchmarks")
    assert sorted(row[0].rpartition(", ")[2] for row in rows) == ["all images", "bf16"]


def test_index_has_ranks_as_csv(site):
    (address,) = re.findall(
        r'href="data:text/csv;base64,([^"]+)"', (site / "index.html").read_text()
    )
    rows = list(csv.reader(io.StringIO(b64decode(address).decode())))
    assert rows[0][:5] == ["method", "family", "place", "Borda, %", "benchmarks"]
    assert len(rows[0]) == 7
    assert rows[3][:3] == ["fedncm", "statistics only", "3"]
    assert float(rows[3][3]) == 68.75


def test_site_is_rebuilt_only_in_its_folder(site, tmp_path):
    pages = {path.name: path.read_text() for path in site.iterdir()}
    (site / "digits-old.html").write_text(pages["index.html"])
    build_site(site, str(site.parent / "runs"))
    assert {path.name: path.read_text() for path in site.iterdir()} == pages
    (tmp_path / "thesis.tex").write_text("mine")
    outcome = CliRunner().invoke(
        main, ["leaderboard", str(site.parent / "runs"), "--out", str(tmp_path)]
    )
    assert outcome.exit_code == 1
    assert "contains thesis.tex, which is not a page of a leaderboard" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_leaderboard_reads_default_archive(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["leaderboard", "--out", "site"])
    assert outcome.exit_code == 1 and outcome.stderr.count("\n") == 1
    assert (
        f"no suite and no file {Path('results/results.csv')} here; run a suite, or name archives"
        in outcome.stderr
    )
    (tmp_path / "results").mkdir()
    command = ["report", str(site.parent / "runs"), "--archive", "results/results.csv"]
    assert CliRunner().invoke(main, command).exit_code == 0
    rows = cells(build_site(tmp_path / "site") / "index.html", "ranks")
    assert [row[:5] for row in rows] == [row[:5] for row in cells(site / "index.html", "ranks")]


TOOLS = """
    const board = document.querySelector("section.board");
    const rows = () => [...board.querySelectorAll("tbody tr[data-family]")]
        .filter(row => !row.hidden).map(row => row.dataset.label);
    const press = name => [...board.querySelectorAll("thead button")]
        .find(button => button.textContent.startsWith(name)).click();
    const choose = (name, word) => {
        const field = board.querySelector(`form [name=${name}]`);
        field.value = word;
        field.dispatchEvent(new window.Event("input", {bubbles: true}));
    };
    const coloured = () => [...board.querySelector(".chart").querySelectorAll(".chosen")]
       .map(g => g.dataset.label);
    const later = () => new Promise(done => setTimeout(done, 50));
"""


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory):
    with serve_site(site, tmp_path_factory.mktemp("profile")) as pages:
        yield pages


def first_page(site: Path) -> str:
    return next(path.name for path in site.iterdir() if "-2x1-" in path.name)


@pytest.mark.browser
@needs_browser
def test_table_sorts_columns_and_filters_rows(site: Path, browser: Site):
    answers = browser.ask(
        first_page(site),
        TOOLS
        + """
        const out = {start: rows()};
        press("A_N"); out.falling = rows();
        press("A_N"); out.rising = rows();
        out.aria = board.querySelector("[aria-sort]").getAttribute("aria-sort");
        press("method"); out.named = rows();
        choose("exemplars", "kept"); out.kept = rows();
        out.count = board.querySelector("output").value;
        out.runs = [...board.querySelectorAll(".runs > div")].filter(run => !run.hidden).length;
        choose("exemplars", ""); choose("trained", "prompts"); out.prompts = rows();
        choose("label", "l2"); out.both = rows();
        board.querySelector("form").reset(); await later(); out.all = rows().length;
        return out;
        """,
    )
    assert answers["start"] == answers["falling"] == list(SCORES)
    assert answers["rising"] == list(SCORES)[::-1]
    assert answers["aria"] == "ascending"
    assert answers["named"] == sorted(SCORES)
    assert (answers["kept"], answers["count"], answers["runs"]) == (["icarl"], "1 of 9 rows", 1)
    assert answers["prompts"] == ["codap", "dualprompt", "hgp", "l2p"]
    assert answers["both"] == ["l2p"]
    assert answers["all"] == 9


@pytest.mark.browser
@needs_browser
def test_chart_colours_six_curves_and_supports_keyboard(site: Path, browser: Site):
    answers = browser.ask(
        first_page(site),
        TOOLS
        + """
        const out = {first: coloured()};
        const box = board.querySelector("tr[data-label=l2p] input");
        box.click(); out.after = coloured();
        const svg = board.querySelector(".plot svg"), tip = board.querySelector(".tip");
        svg.focus(); out.focused = document.activeElement === svg;
        const key = name =>
            svg.dispatchEvent(new window.KeyboardEvent("keydown", {key: name, bubbles: true}));
        key("ArrowRight"); out.tip = tip.textContent; out.shown = !tip.hidden;
        out.lit = [...board.querySelectorAll("tr.lit")].map(row => row.dataset.label);
        key("ArrowRight"); key("ArrowDown"); out.next = tip.textContent;
        key("Escape"); out.gone = tip.hidden;
        const circle = svg.querySelector("[data-label=pilora] circle:last-of-type");
        const mark = circle.getBoundingClientRect();
        const middle = {clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2};
        const move = new window.PointerEvent("pointermove", {...middle, bubbles: true});
        svg.dispatchEvent(move); out.hover = tip.textContent;
        board.querySelector("tr[data-label=fedavg] a").focus();
        out.pointed = [...svg.querySelectorAll(".series.lit")].map(g => g.dataset.label);
        return out;
        """,
    )
    assert sorted(answers["first"]) == sorted(LEADERS)
    assert sorted(answers["after"]) == sorted(
        [*LEADERS[1:], "l2p"]
    )  # the oldest selection is removed
    assert answers["focused"]
    assert answers["shown"]
    assert answers["gone"]
    assert answers["tip"] == "hgptasks learned 1: 90 ± 0 over 3 seeds"
    assert set(answers["lit"]) == {"hgp"}
    assert answers["next"] == "codaptasks learned 2: 74.5 ± 0.5 over 3 seeds"
    assert answers["hover"] == "piloratasks learned 2: 73 ± 0.5 over 3 seeds"
    assert answers["pointed"] == ["fedavg"]


@pytest.mark.browser
@needs_browser
def test_pair_table_reports_cell_by_pointer_and_keys(site: Path, browser: Site):
    """Report the pair of a cell by pointer and by keys.

    In ewc's row and l2p's column, A_N differs by 3, 1.5 and 3.
    """
    answers = browser.ask(
        first_page(site),
        TOOLS
        + """
        const table = board.querySelector("table.pairs"), out = {};
        table.closest("details").open = true;
        const line = () => table.closest(".scroll").nextElementSibling.value;
        const cell = table.querySelector("tr[data-label=ewc] td[data-column=l2p]");
        cell.dispatchEvent(new window.PointerEvent("pointerover", {bubbles: true}));
        out.pointed = line();
        const first = table.querySelector("td[tabindex='0']");
        out.stops = table.querySelectorAll("td[tabindex='0']").length;
        first.focus(); out.first = line();
        const key = name => document.activeElement
            .dispatchEvent(new window.KeyboardEvent("keydown", {key: name, bubbles: true}));
        key("ArrowRight"); out.right = line();
        key("ArrowDown"); out.down = line();
        key("ArrowLeft"); out.edge = line();
        return out;
        """,
    )
    assert re.fullmatch(
        r"ewc − l2p: 2\.50 points over 3 seeds, p 0\.038, corrected 0\.\d+", answers["pointed"]
    )
    assert answers["stops"] == 1
    assert answers["first"] == "hgp and codap: not tested"
    assert answers["right"] == "hgp and dualprompt: not tested"
    assert answers["down"] == "codap and dualprompt: not tested" == answers["edge"]


@pytest.mark.browser
@needs_browser
def test_pages_fit_phone_width_without_browser_errors(site: Path, browser: Site):
    for page in ("index.html", first_page(site)):
        wide = browser.ask(page, "return document.documentElement.scrollWidth")
        assert wide <= 390, page
        assert browser.complaints(page) == []
    link = browser.ask(
        first_page(site),
        """
        document.querySelector("tr[data-label=icarl] a").click();
        await new Promise(done => setTimeout(done, 100));
        return document.getElementById(window.location.hash.slice(1)).closest("details").open;
        """,
    )
    assert link is True
