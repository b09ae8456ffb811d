"""Pages of the handbook that are written from the registry, each time it is built."""

import dataclasses
import inspect
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from blocks import blocks_page, pipe_table, rst
from figure import draw

import fczoo
import fczoo.testing
from fczoo.board.benchmark_page import heading
from fczoo.cli.info import source_page
from fczoo.cli.listing import KINDS, REGISTRIES, listing
from fczoo.cli.show import dataset_values, describe_exchange, part_page
from fczoo.core.method import Method
from fczoo.core.options import describe_type, quirks, spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.core.training import Training
from fczoo.core.types import OPTIONAL, Batch, Context, ServerContext
from fczoo.models.card import method_entries
from fczoo.papers.compare import plus_minus
from fczoo.protocols.registry import PROTOCOLS, RELEASES
from fczoo.reports.runs import Experiment
from fczoo.reports.suites import experiments_of_suites
from fczoo.reports.tables import COLUMNS, entry_of
from fczoo.reports.text_format import option_word

DATASET = "digits"
"""Where what a method sends is measured."""

READINGS = Path(__file__).with_name("readings.md")
READING_HEAD = ["reading", "source", "what fczoo does by default", "file"]
RESULTS = Path(__file__).parents[1] / "results"
METRIC_COLUMNS = ("A_N", "Avg", "forgetting")


def write(folder: Path) -> None:
    """Write all generated pages below ``folder``, again."""
    shutil.rmtree(folder, ignore_errors=True)
    texts = {
        "methods/index": _methods_index(),
        "protocols": _sources_page("Protocols", PROTOCOLS, "protocol"),
        "releases": _sources_page("Released code", RELEASES, "release"),
        "parts": _parts_page(),
        "api": _api_page(),
        "blocks": blocks_page(),
    }
    texts |= {f"methods/{name}": _method_page(METHODS.get(name)) for name in _ours(METHODS)}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(f"{text.rstrip()}\n", encoding="utf-8")
    _copy_results(folder / "results")


def _copy_results(folder: Path) -> None:
    """Copy pages and pictures next to the archive; a browser of the repository shows them there."""
    shutil.copytree(RESULTS / "pictures", folder / "pictures", dirs_exist_ok=True)
    for page in RESULTS.glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("](../docs/", "](../../")
        (folder / page.name).write_text(text, encoding="utf-8")


def _ours(registry: Any) -> list[str]:
    """Names of this package; installed plug-ins have no place in its handbook."""
    return [n for n in registry.names() if registry.get(n).__module__.startswith("fczoo.")]


def _literal(text: str, language: str = "text") -> str:
    return f"~~~~{language}\n{text}\n~~~~"


# --- methods


def _methods_index() -> str:
    baselines = METHODS.names("fczoo.baselines")
    groups = {"methods": [n for n in _ours(METHODS) if n not in baselines], "baselines": baselines}
    parts = ["# Methods", "A page each, as `fczoo show METHOD` has them. What is sent is measured."]
    for kind, names in groups.items():
        rows = [(f"[{name}]({name}.md)", METHODS.about(name)) for name in names]
        parts += [f"## {kind.capitalize()}: {KINDS[kind]}", pipe_table(rows, ["name", "idea"])]
        parts.append(_toctree(names, kind.capitalize()))
    return "\n\n".join(parts)


def _toctree(names: Iterable[str], caption: str) -> str:
    return "\n".join(["~~~~{toctree}", ":hidden:", f":caption: {caption}", "", *names, "~~~~"])


def _method_page(cls: type[Method]) -> str:
    method = create_method(cls.name, DATASET)
    parts = [f"# {cls.name}", rst(inspect.getdoc(cls) or ""), draw(method, DATASET)]
    if "formulas" in vars(cls):
        parts.append(f"## Formulas\n\n{inspect.cleandoc(cls.formulas)}")
    parts += ["## Options", f"Given as `--set {cls.name}.OPTION=VALUE`.", _options_table(cls)]
    if cls.dataset_options:
        parts += [
            "## Values by data set",
            "\n".join(f"- {values}" for values in dataset_values(cls)),
        ]
    exchange_text = "\n\n".join(describe_exchange(method, DATASET))
    parts += ["## What is trained and what is sent", _literal(exchange_text)]
    if quirk_rows := [
        (f"`{q.field}={option_word(q.value)}`", q.meaning, q.place)
        for q in quirks(METHODS.options(cls.name))
    ]:
        parts += [
            "## Quirks of released code",
            pipe_table(quirk_rows, ["option", "what it does", "seen in"]),
        ]
    if rows := _readings(cls.name):
        parts += [
            "## Readings that are not the default",
            pipe_table(rows, READING_HEAD[:3]),
        ]
    if rows := _results(cls.name):
        about = (
            "Runs of the suites, which train much less than the papers do. "
            "[All results](../results/README.md) lists the conclusions."
        )
        head = ["benchmark", "row", *METRIC_COLUMNS, "seeds"]
        parts += ["## Results", about, pipe_table(rows, head)]
    entries = _literal("\n\n".join(method_entries(cls)), "bibtex")
    return "\n\n".join([*parts, "## Citation", f"{cls.paper}.", entries])


@cache
def _experiments() -> list[Experiment]:
    return experiments_of_suites(RESULTS) or []


def _results(method: str) -> list[tuple[str, ...]]:
    """Return the method's rows in all tables of the repository's results."""
    rows = []
    for experiment in _experiments():
        words = heading(experiment)
        for line in experiment.lines:
            if line.results[0].method == method:
                entries = [entry_of(line, COLUMNS[name]) for name in METRIC_COLUMNS]
                figures = [plus_minus(entry.mean, entry.std) if entry else "" for entry in entries]
                rows.append(
                    (f"{words.title}; {words.subtitle}", line.label, *figures, str(len(line.seeds)))
                )
    return [*dict.fromkeys(rows)]  # suites may share runs


def _options_table(cls: type[Any]) -> str:
    """Return a table of the options with default, type, limits and where ``fczoo tune`` looks."""
    hints, search_spaces = get_type_hints(cls), spaces(cls)
    rows = []
    for field in dataclasses.fields(cls):
        metadata = field.metadata
        limits = " to ".join(
            "…" if end is None else f"{end:g}"
            for end in (metadata.get("low"), metadata.get("high"))
        )
        space = ", ".join(map(option_word, search_spaces.get(field.name, ())))
        rows.append(
            (
                f"`{field.name}`",
                f"`{option_word(field.default)}`",
                describe_type(hints[field.name]),
                "" if limits == "… to …" else limits,
                space,
                metadata.get("meaning", ""),
            )
        )
    return (
        pipe_table(rows, ["option", "default", "type", "limits", "tuning", "meaning"])
        if rows
        else "None."
    )


def _readings(name: str) -> list[list[str]]:
    """Return the rows of the page of readings that are about one method.

    The methods of a row stand before its first colon, or else in the heading above its table.
    """
    rows: list[list[str]] = []
    heading: list[str] = []
    for line in READINGS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ").split(", ")
        cells = line.strip("| ").split(" | ")
        if not line.startswith("| ") or cells == READING_HEAD:
            continue
        names = cells[0].partition(": ")[0].split(", ")
        names = names if all(map(METHODS.find, names)) else heading
        if len(cells) == len(READING_HEAD) and name in map(METHODS.find, names):
            rows.append(cells[:3])
    return [row for row in rows if row[0] != "---"]


# --- protocols, other parts


def _sources_page(title: str, registry: Any, kind: str) -> str:
    """Return all that protocols or releases state, by data set, with its source."""
    parts = [f"# {title}", f"As `fczoo show {kind} NAME --dataset NAME` prints them."]
    for name in _ours(registry):
        cls = registry.get(name)
        parts += [f"## {name}", _literal(source_page(cls, None))]
        for dataset in cls.datasets:
            parts += [f"### {name} on {dataset}", _literal(source_page(cls, dataset))]
    return "\n\n".join(parts)


def _parts_page() -> str:
    parts = [
        "# Data sets, partitioners, aggregators, attacks, local training",
        "As `fczoo show NAME` prints them.",
    ]
    for kind, registry in REGISTRIES.items():
        if registry in (PROTOCOLS, RELEASES):
            continue
        parts += [f"## {kind.capitalize()}", f"{KINDS[kind].capitalize()}."]
        for name in _ours(registry):
            parts += [f"### {name}", _literal(part_page(name, DATASET, registry))]
    return "\n\n".join([*parts, "## Backbones", _literal(listing("backbones"))])


# --- public names


def _api_page() -> str:
    parts = [
        "# API",
        "## fczoo",
        rst(_directives(fczoo, [n for n in fczoo.__all__ if n not in METHOD_PAGE])),
    ]
    parts += ["## What a method sees and declares", rst(_directives(fczoo, METHOD_PAGE))]
    classes = "\n".join(f".. autoclass:: fczoo.core.types.{name}" for name in OPTIONAL)
    parts.append(rst(classes))
    parts += ["## fczoo.testing", rst(_directives(fczoo.testing, fczoo.testing.__all__))]
    return "\n\n".join(parts)


METHOD_PAGE = ["Method", *(cls.__name__ for cls in (Training, Batch, Context, ServerContext))]


def _directives(module: Any, names: Iterable[str]) -> str:
    """Return a directive for each class and function; ``Tree`` is neither but another word for a
    dictionary.
    """
    entries = {name: getattr(module, name) for name in names}
    return "\n".join(
        f".. auto{'class' if inspect.isclass(entry) else 'function'}:: {module.__name__}.{name}"
        for name, entry in entries.items()
        if inspect.isclass(entry) or inspect.isfunction(entry)
    )
