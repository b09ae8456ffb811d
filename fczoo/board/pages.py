"""HTML page of a report, and site of a leaderboard."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fczoo import __version__
from fczoo.board.benchmark_page import benchmark, choices, heading, sort_lines, tags_of
from fczoo.board.charts import as_csv
from fczoo.board.ranks import RankEntry, borda
from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, write_safely
from fczoo.reports.figure_data import Figure
from fczoo.reports.figures import colour_order
from fczoo.reports.run_config import count_changes
from fczoo.reports.runs import Experiment, Line, read_experiments
from fczoo.reports.significance import MIN_METHODS, critical_difference, describe_shortage
from fczoo.reports.table_formats import TEST_NOTE, UNTESTED_NOTE
from fczoo.reports.tables import COLUMNS, entry_of, percent

GENERATOR = "fczoo board"
SCRIPTS = ("charts.js", "board.js")


@cache
def asset(name: str) -> str:
    """Read a template, style sheet or script of the pages."""
    return (files("fczoo.assets") / "board" / name).read_text(encoding="utf-8")


def render(template: str, **content: Any) -> str:
    """Render a page.

    Its content security policy contains the hash of its script, so no other script runs.

    Args:
        template: File name of a template in ``fczoo/assets/board``.
        **content: Values of the template's names; a missing name is an error.

    Returns:
        HTML text with one newline at its end.
    """
    script = "\n".join(map(asset, SCRIPTS))
    page = (
        _environment()
        .get_template(template)
        .render(
            style=Markup(asset("board.css")),
            script=Markup(script),
            script_sha256=base64.b64encode(
                hashlib.sha256(f"\n{script}\n".encode()).digest()
            ).decode(),
            generator=GENERATOR,
            version=__version__,
            **content,
        )
    )
    return f"{page.rstrip()}\n"


@cache
def _environment() -> Environment:
    """Return the shared template environment, which compiles each template once."""
    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["data"] = as_data
    return environment


def as_data(content: Any) -> Markup:
    """Format JSON for a script element; no text in it can close the element."""
    return Markup(encode_json(content, separators=(",", ":")).replace("<", "\\u003c"))


INDEX = "index.html"


def write_page(
    places: Sequence[Path], out: Path, extra_figures: Sequence[Sequence[Figure]] = ()
) -> None:
    """Write one page with all experiments of some runs.

    Args:
        places: Run folders, archives, or folders that contain them.
        out: HTML file to write; its folder is created if needed.
        extra_figures: Further figures of each experiment, in the order of ``read_experiments``.

    Raises:
        FczooError: No run is finished, or a file is damaged.
    """
    experiments = read_experiments(places)
    text = _benchmarks(
        experiments, home="", order=colour_order(experiments), extra_figures=extra_figures
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_safely(out, text.encode())


def write_site(places: Sequence[Path], folder: Path) -> int:
    """Write a site: an index and one page per benchmark.

    Other pages of an earlier site are deleted.

    Args:
        places: Run folders, archives, or folders that contain them.
        folder: Folder of the site: a new one, an empty one, or one with an earlier site.

    Returns:
        Number of benchmarks.

    Raises:
        FczooError: No run is finished, or the folder contains other files.
    """
    experiments = sorted(read_experiments(places), key=_weight, reverse=True)
    order = colour_order(experiments)
    pages = {heading(e).file: _benchmarks([e], INDEX, order) for e in experiments}
    write_pages(folder, {**pages, INDEX: _index(experiments)})
    return len(experiments)


def write_pages(folder: Path, pages: Mapping[str, str]) -> None:
    """Write the pages of a site; delete other pages of an earlier site.

    Args:
        folder: Folder of the site.
        pages: HTML texts by file name.

    Raises:
        FczooError: The folder contains other files.
    """
    earlier_pages = _earlier_pages(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        write_safely(folder / name, text.encode())
    for path in earlier_pages:
        if path.name not in pages:
            path.unlink()


def _weight(experiment: Experiment) -> tuple[int, int]:
    """Return the sort key of a benchmark: its number of methods, then of runs."""
    return len(_ranked_methods(experiment)), sum(len(line.records) for line in experiment.lines)


def _ranked_methods(experiment: Experiment) -> set[str]:
    """Return the methods that can be ranked, tuned or not."""
    lines = [line for line in experiment.lines if line.is_ranked and entry_of(line, COLUMNS["A_N"])]
    return {line.records[0].method for line in lines}


def _earlier_pages(folder: Path) -> list[Path]:
    """Return the pages of an earlier site.

    Raises FczooError if the folder contains other files, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise FczooError(f"{folder} is a file; give a new folder with --out")
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    foreign_names = [path.name for path in paths if not _is_site_page(path)]
    if foreign_names:
        raise FczooError(
            f"{folder} contains {foreign_names[0]}, which is not a page of a leaderboard; "
            "give a new folder with --out"
        )
    return paths


def _is_site_page(path: Path) -> bool:
    if path.suffix != ".html" or not path.is_file():
        return False
    return f'content="{GENERATOR}"' in path.read_text(encoding="utf-8", errors="replace")[:2000]


def _benchmarks(
    experiments: Sequence[Experiment],
    home: str,
    order: Mapping[str, int],
    extra_figures: Sequence[Sequence[Figure]] = (),
) -> str:
    benchmark_data = [
        benchmark(experiment, i, order, extra_figures[i] if extra_figures else ())
        for i, experiment in enumerate(experiments)
    ]
    return render(
        "benchmarks.html",
        benchmarks=benchmark_data,
        home=home,
        suite=None,
        test=TEST_NOTE,
        untested=UNTESTED_NOTE,
    )


# --- index page


def candidates(experiment: Experiment, tuned: bool = False) -> dict[str, tuple[Line, float]]:
    """Choose the row of each ranked method: the one with the fewest changed options.

    See ``count_changes``. Ties are broken by more trials of ``fczoo tune``, then more seeds, then
    the order of rows, but never by score, which would reward many attempts.

    Args:
        experiment: Benchmark with the rows.
        tuned: Whether to use only rows for which ``fczoo tune`` found the values.

    Returns:
        Row and its mean A_N by method; methods without A_N are left out.
    """
    best_lines: dict[str, tuple[tuple[int, int, int], Line]] = {}
    for line in experiment.lines:
        if line.is_ranked and (line.is_tuned or not tuned):
            key = (
                count_changes(line),
                -min(record.trials for record in line.records),
                -len(line.records),
            )
            current_best = best_lines.get(line.records[0].method)
            if current_best is None or key < current_best[0]:
                best_lines[line.records[0].method] = key, line
    return {
        name: (line, entry.mean)
        for name, (_, line) in best_lines.items()
        if (entry := entry_of(line, COLUMNS["A_N"]))
    }


def _index(experiments: Sequence[Experiment]) -> str:
    """Render the list of benchmarks and the ranking over them.

    If a benchmark has several tuned methods, only tuned rows are ranked.
    """
    candidate_rows = [candidates(experiment, tuned=True) for experiment in experiments]
    has_tuned = any(len(by_method) > 1 for by_method in candidate_rows)
    if not has_tuned:
        candidate_rows = [candidates(experiment) for experiment in experiments]
    scores = [
        {name: score for name, (_, score) in by_method.items()} for by_method in candidate_rows
    ]
    standings = borda(scores)
    ranked_indices = [i for i, by_method in enumerate(candidate_rows) if len(by_method) > 1]
    methods = [
        _method(name, standing, [(experiments[i], candidate_rows[i]) for i in ranked_indices])
        for name, standing in standings.items()
    ]
    blocks = [values for values in scores if len(values) >= MIN_METHODS]
    rows = [_benchmark(i, experiment) for i, experiment in enumerate(experiments)]
    return render(
        "index.html",
        runs=sum(len(line.records) for experiment in experiments for line in experiment.lines),
        method_count=len(
            {name for experiment in experiments for name in _ranked_methods(experiment)}
        ),
        methods=methods,
        tuned=has_tuned,
        benchmarks=rows,
        ranked_benchmarks=[rows[i] for i in ranked_indices],
        choices=choices(
            [tags_of(line) for by_method in candidate_rows for line, _ in by_method.values()]
        ),
        csv=_csv(methods, [rows[i] for i in ranked_indices]),
        ranks=critical_difference(blocks),
        shortage=describe_shortage(blocks, "benchmarks"),
    )


def _benchmark(index: int, experiment: Experiment) -> dict[str, Any]:
    """Return a row of the list of benchmarks."""
    best = sort_lines(experiment)[0]
    entry = entry_of(best, COLUMNS["A_N"]) if best.is_ranked else None
    return {
        "number": f"#{index + 1}",
        "heading": heading(experiment),
        "rows": len(experiment.lines),
        "seeds": len(experiment.seeds),
        "first": f"{best.label}, {percent(entry.mean)}" if entry else "–",
    }


def _method(
    name: str,
    standing: RankEntry,
    benchmarks: Sequence[tuple[Experiment, Mapping[str, tuple[Line, float]]]],
) -> dict[str, Any]:
    """Return a row of the ranking."""
    tags: dict[str, dict[str, None]] = {}
    entries: list[dict[str, Any] | None] = []
    for experiment, by_method in benchmarks:
        if name not in by_method:
            entries.append(None)
            continue
        line, score = by_method[name]
        for key, values in tags_of(line).items():
            tags.setdefault(key, {}).update(dict.fromkeys(values))
        rank = 1 + sum(rival_score > score for _, rival_score in by_method.values())
        entries.append(
            {
                "place": rank,
                "label": line.label,
                "score": percent(score),
                "address": heading(experiment).file,
            }
        )
    return {
        "label": name,
        "tags": {key: list(values) for key, values in tags.items()},
        "place": standing.place,
        "share": standing.share,
        "benchmark_count": standing.benchmark_count,
        "entries": entries,
    }


def _csv(methods: Sequence[Mapping[str, Any]], benchmarks: Sequence[Mapping[str, Any]]) -> str:
    titles = [f"{b['heading'].title}; {b['heading'].subtitle}" for b in benchmarks]
    rows = [
        (
            m["label"],
            ", ".join(m["tags"]["family"]),
            m["place"] or "",
            m["share"],
            m["benchmark_count"],
            *(entry["place"] if entry else "" for entry in m["entries"]),
        )
        for m in methods
    ]
    return as_csv(["method", "family", "place", "Borda, %", "benchmarks", *titles], rows)
