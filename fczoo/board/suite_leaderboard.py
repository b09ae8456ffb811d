"""Site of a leaderboard of suites: a start page with their questions, and a page per suite."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fczoo.board.benchmark_page import benchmark, choices, heading, tags_of
from fczoo.board.charts import as_csv
from fczoo.board.pages import INDEX, render, write_pages
from fczoo.board.ranks import Cost, RankEntry, borda
from fczoo.board.suite_text import difference_sentences
from fczoo.core.errors import FczooError
from fczoo.reports.figures import colour_order
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import MIN_METHODS, critical_difference, describe_shortage
from fczoo.reports.suites import SUITES, Suite, archives_of, read_suite, suite_experiments
from fczoo.reports.table_formats import TEST_NOTE, UNTESTED_NOTE
from fczoo.reports.tables import COLUMNS, entry_of, percent


@dataclass(frozen=True)
class SuiteTable:
    """One table of a suite: its runs in one setting."""

    suite: str  # name of the suite
    experiment: Experiment
    roles: Mapping[str, str]  # role by row label
    index: int  # position on the suite's page

    @property
    def address(self) -> str:
        return f"{self.suite}.html#b{self.index}"

    @cached_property
    def method_rows(self) -> dict[str, tuple[Line, float]]:
        """Return the row of each method, without ablations, and its mean A_N, best first."""
        entries = [
            (line, entry)
            for line in self.experiment.lines
            if line.is_ranked and self.roles[line.label] != "ablation"
            if (entry := entry_of(line, COLUMNS["A_N"]))
        ]
        by_accuracy = sorted(entries, key=lambda pair: -pair[1].mean)
        return {line.records[0].method: (line, entry.mean) for line, entry in by_accuracy}

    @property
    def scores(self) -> dict[str, float]:
        return {name: score for name, (_, score) in self.method_rows.items()}

    @property
    def traffic(self) -> dict[str, Cost]:
        """Return the bytes per run of each method, up and down."""
        return {
            name: ("", statistics.fmean(r.bytes_up + r.bytes_down for r in line.results))
            for name, (line, _) in self.method_rows.items()
        }

    @property
    def time(self) -> dict[str, Cost]:
        """Return the seconds per run of each method, with its processor."""
        return {
            name: (_processors(line), statistics.fmean(r.seconds for r in line.results))
            for name, (line, _) in self.method_rows.items()
        }


def _processors(line: Line) -> str:
    hardware = [record.bench_file.hardware for record in line.records]
    return "; ".join(sorted({f"{h.get('cpu')} {h.get('gpus')}" for h in hardware}))


def has_suites(results: Path) -> bool:
    """Return whether a folder has a suite with runs.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
    """
    return any(archive.is_file() for archive in archives_of(results).values())


def write_suite_site(results: Path, folder: Path) -> int:
    """Write a start page and one page per suite.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
        folder: Folder of the site: a new one, an empty one, or one with an earlier site.

    Returns:
        Number of suites with runs.

    Raises:
        FczooError: No suite has runs, a suite or its archive is damaged, or the folder contains
            other files.
    """
    suites: dict[str, Suite] = {}
    tables: dict[str, list[SuiteTable]] = {}
    for file, archive in archives_of(results).items():
        name = file.stem
        suite = suites[name] = read_suite(file)
        roles = {row.label: row.role for row in suite.rows}
        experiments = suite_experiments(suite, archive) if archive.is_file() else []
        tables[name] = [SuiteTable(name, e, roles, i) for i, e in enumerate(experiments)]
    all_tables = [table for suite_tables in tables.values() for table in suite_tables]
    if not all_tables:
        raise FczooError(f"no suite in {results / SUITES} has runs; see `fczoo suite run`")
    order = colour_order([table.experiment for table in all_tables])
    pages = {
        f"{name}.html": _suite_page(name, suites[name], suite_tables, order)
        for name, suite_tables in tables.items()
        if suite_tables
    }
    write_pages(folder, {**pages, INDEX: _start_page(suites, tables)})
    return len(pages)


def _suite_page(
    name: str, suite: Suite, tables: Sequence[SuiteTable], order: Mapping[str, int]
) -> str:
    return render(
        "benchmarks.html",
        benchmarks=[benchmark(t.experiment, t.index, order, roles=t.roles) for t in tables],
        home=INDEX,
        suite={
            "name": name,
            "question": suite.question,
            "cut": suite.cut,
            "sentences": difference_sentences([t.experiment for t in tables], suite.compare),
        },
        test=TEST_NOTE,
        untested=UNTESTED_NOTE,
    )


def _start_page(suites: Mapping[str, Suite], tables: Mapping[str, Sequence[SuiteTable]]) -> str:
    """Render the questions of the suites and the ranking over their tables."""
    all_tables = [table for suite_tables in tables.values() for table in suite_tables]
    ranked_tables = [table for table in all_tables if len(table.method_rows) > 1]
    scores = [table.scores for table in ranked_tables]
    rankings = [
        borda(scores, costs)
        for costs in (None, [t.traffic for t in ranked_tables], [t.time for t in ranked_tables])
    ]
    methods = [_method(name, rankings, ranked_tables) for name in rankings[0]]
    columns = [
        {"name": _column_name(table), "title": heading(table.experiment).title}
        for table in ranked_tables
    ]
    blocks = [block for block in scores if len(block) >= MIN_METHODS]
    tags = [tags_of(line) for table in ranked_tables for line, _ in table.method_rows.values()]
    lines = [line for table in all_tables for line in table.experiment.lines]
    return render(
        "suites.html",
        runs=sum(len(line.records) for line in lines),
        method_count=len({line.records[0].method for line in lines}),
        suites=[
            {
                "name": name,
                "question": suite.question,
                "address": f"{name}.html",
                "benchmarks": [_benchmark(table) for table in tables[name]],
            }
            for name, suite in suites.items()
        ],
        methods=methods,
        columns=columns,
        choices=choices(tags),
        csv=_csv(methods, columns),
        ranks=critical_difference(blocks),
        shortage=describe_shortage(blocks, "tables"),
    )


def _column_name(table: SuiteTable) -> str:
    return f"{table.suite}, {table.experiment.bench_file.partition['spec']}"


def _benchmark(table: SuiteTable) -> dict[str, Any]:
    """Return the row of a table in the list of suites."""
    methods = {
        name: pair for name, pair in table.method_rows.items() if _role(table, name) == "method"
    }
    first = next(iter(methods), None)
    return {
        "id": f"b{table.index}",
        "heading": heading(table.experiment),
        "first": f"{first}, {percent(methods[first][1])}" if first else "–",
        "methods": len(methods),
        "seeds": len(table.experiment.seeds),
    }


def _role(table: SuiteTable, name: str) -> str:
    return table.roles[table.method_rows[name][0].label]


def _method(
    name: str, rankings: Sequence[Mapping[str, RankEntry]], tables: Sequence[SuiteTable]
) -> dict[str, Any]:
    """Return the row of a method in the ranking."""
    tags: dict[str, dict[str, None]] = {}
    entries: list[dict[str, Any] | None] = []
    role = "method"
    for table in tables:
        if name not in table.method_rows:
            entries.append(None)
            continue
        line, score = table.method_rows[name]
        role = _role(table, name)
        for key, values in tags_of(line).items():
            tags.setdefault(key, {}).update(dict.fromkeys(values))
        rank = 1 + sum(rival > score for rival in table.scores.values())
        entries.append({"place": rank, "score": percent(score), "address": table.address})
    return {
        "label": name,
        "role": role,
        "tags": {key: list(values) for key, values in tags.items()},
        "places": [(ranking[name].place, ranking[name].share) for ranking in rankings],
        "benchmark_count": rankings[0][name].benchmark_count,
        "entries": entries,
    }


def _csv(methods: Sequence[Mapping[str, Any]], columns: Sequence[Mapping[str, Any]]) -> str:
    kinds = ("", " at equal bytes", " at equal compute")
    head = [f"{name}{kind}" for kind in kinds for name in ("place", "Borda, %")]
    rows = [
        (
            m["label"],
            m["role"],
            *(value for rank, share in m["places"] for value in (rank or "", share)),
            m["benchmark_count"],
            *(entry["place"] if entry else "" for entry in m["entries"]),
        )
        for m in methods
    ]
    return as_csv(["method", "role", *head, "tables", *(c["name"] for c in columns)], rows)
