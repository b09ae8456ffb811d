"""The page of a report, and the site of a leaderboard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.board.benchmark import benchmark, choices, ordered
from fczoo.board.download import as_csv
from fczoo.board.heading import heading
from fczoo.board.ranks import RANKED, Standing, borda, critical, shortage
from fczoo.board.rendering import GENERATOR, render
from fczoo.board.traits import Traits, traits
from fczoo.core.errors import FczooError
from fczoo.core.files import write_safely
from fczoo.reports.chosen import changes
from fczoo.reports.columns import COLUMNS, percent
from fczoo.reports.figures import colour_order
from fczoo.reports.runs import Experiment, Line, read_experiments
from fczoo.reports.tables import entry_of
from fczoo.reports.text import TEST, UNTESTED

INDEX = "index.html"


def write_page(places: Sequence[Path], out: Path) -> None:
    """Write one page with all experiments of the runs at or below some places.

    Raises FczooError for places that hold no finished run.
    """
    experiments = read_experiments(places)
    text = _benchmarks(experiments, home="", order=colour_order(experiments))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_safely(out, text.encode())


def write_site(places: Sequence[Path], folder: Path) -> int:
    """Write an index and a page a benchmark into a folder of their own; returns the number of benchmarks.

    Raises FczooError for places that hold no finished run, and for a folder with anything but such a site.
    """
    experiments = sorted(read_experiments(places), key=_weight, reverse=True)
    order = colour_order(experiments)
    pages = {heading(e).file: _benchmarks([e], INDEX, order) for e in experiments}
    earlier = _earlier(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**pages, INDEX: _index(experiments)}.items():
        write_safely(folder / name, text.encode())
    for path in earlier:
        if path.name not in {*pages, INDEX}:
            path.unlink()
    return len(experiments)


def _weight(experiment: Experiment) -> tuple[int, int]:
    """Benchmarks with more methods, then those with more runs, come first."""
    return len(_competing(experiment)), sum(len(line.cells) for line in experiment.lines)


def _competing(experiment: Experiment) -> set[str]:
    """The methods that take part in a ranking, were its rows tuned or not."""
    lines = [line for line in experiment.lines if line.competes and entry_of(line, COLUMNS["A_N"])]
    return {line.cells[0].method for line in lines}


def _earlier(folder: Path) -> list[Path]:
    """The pages of an earlier site. Raises FczooError where the folder holds anything else."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    other = [path.name for path in found if not _ours(path)]
    if other or (folder.exists() and not folder.is_dir()):
        named = other[0] if other else "a file"
        raise FczooError(
            f"{folder} holds {named}, which is no page of a leaderboard; give a new folder with --out"
        )
    return found


def _ours(path: Path) -> bool:
    if path.suffix != ".html" or not path.is_file():
        return False
    return f'content="{GENERATOR}"' in path.read_text(encoding="utf-8", errors="replace")[:2000]


def _benchmarks(experiments: Sequence[Experiment], home: str, order: Mapping[str, int]) -> str:
    shown = [benchmark(experiment, i, order) for i, experiment in enumerate(experiments)]
    return render("benchmarks.html", benchmarks=shown, home=home, test=TEST, untested=UNTESTED)


# --- the index


@dataclass(frozen=True)
class Candidate:
    """The row with which a method takes part in the ranking of a benchmark."""

    line: Line
    score: float  # mean A_N
    words: Traits


def candidates(experiment: Experiment, tuned: bool = False) -> dict[str, Candidate]:
    """For each method that competes, its row with fewest options other than the method's: see ``changes``.

    With ``tuned`` only rows of which ``fczoo tune`` found the values are looked at. Among such rows that with
    most of its trials, then most seeds, then the first; never by score, which would reward many tries.
    """
    found: dict[str, tuple[tuple[int, int, int], Line]] = {}
    for line in experiment.lines:
        if line.competes and (line.tuned or not tuned):
            key = changes(line), -min(cell.trials for cell in line.cells), -len(line.cells)
            before = found.get(line.cells[0].method)
            if before is None or key < before[0]:
                found[line.cells[0].method] = key, line
    return {
        name: Candidate(line, entry.mean, traits(line))
        for name, (_, line) in found.items()
        if (entry := entry_of(line, COLUMNS["A_N"]))
    }


def _index(experiments: Sequence[Experiment]) -> str:
    """The list of benchmarks, and ranks over them: of tuned rows alone where there are any to be compared."""
    fields = [candidates(experiment, tuned=True) for experiment in experiments]
    tuned = any(len(field) > 1 for field in fields)
    if not tuned:
        fields = [candidates(experiment) for experiment in experiments]
    scores = [{name: c.score for name, c in field.items()} for field in fields]
    standings = borda(scores)
    counted = [i for i, field in enumerate(fields) if len(field) > 1]
    methods = [
        _method(name, standing, [(experiments[i], fields[i]) for i in counted])
        for name, standing in standings.items()
    ]
    blocks = [own for own in scores if len(own) >= RANKED]
    rows = [_benchmark(i, experiment) for i, experiment in enumerate(experiments)]
    return render(
        "index.html",
        runs=sum(len(line.cells) for experiment in experiments for line in experiment.lines),
        known=len({name for experiment in experiments for name in _competing(experiment)}),
        methods=methods,
        tuned=tuned,
        benchmarks=rows,
        counted=[rows[i] for i in counted],
        choices=choices([c.words for field in fields for c in field.values()]),
        csv=_csv(methods, [rows[i] for i in counted]),
        ranks=critical(blocks),
        shortage=shortage(blocks, "benchmarks"),
    )


def _benchmark(index: int, experiment: Experiment) -> dict[str, Any]:
    """A row of the list of benchmarks."""
    best = ordered(experiment)[0]
    entry = entry_of(best, COLUMNS["A_N"]) if best.competes else None
    return {
        "number": f"#{index + 1}",
        "heading": heading(experiment),
        "rows": len(experiment.lines),
        "seeds": len(experiment.seeds),
        "first": f"{best.label}, {percent(entry.mean)}" if entry else "–",
    }


def _method(
    name: str, standing: Standing, benchmarks: Sequence[tuple[Experiment, Mapping[str, Candidate]]]
) -> dict[str, Any]:
    """A row of the ranking."""
    words: dict[str, dict[str, None]] = {}
    entries: list[dict[str, Any] | None] = []
    for experiment, field in benchmarks:
        own = field.get(name)
        if own is None:
            entries.append(None)
            continue
        for key, values in own.words.words().items():
            words.setdefault(key, {}).update(dict.fromkeys(values))
        place = 1 + sum(other.score > own.score for other in field.values())
        entries.append(
            {
                "place": place,
                "label": own.line.label,
                "score": percent(own.score),
                "address": heading(experiment).file,
            }
        )
    return {
        "label": name,
        "words": {key: list(values) for key, values in words.items()},
        "place": standing.place,
        "share": standing.share,
        "taken": standing.taken,
        "entries": entries,
    }


def _csv(methods: Sequence[Mapping[str, Any]], benchmarks: Sequence[Mapping[str, Any]]) -> str:
    titles = [f"{b['heading'].title}; {b['heading'].subtitle}" for b in benchmarks]
    rows = [
        (
            m["label"],
            ", ".join(m["words"]["family"]),
            m["place"] or "",
            m["share"],
            m["taken"],
            *(entry["place"] if entry else "" for entry in m["entries"]),
        )
        for m in methods
    ]
    return as_csv(["method", "family", "place", "Borda, %", "benchmarks", *titles], rows)
