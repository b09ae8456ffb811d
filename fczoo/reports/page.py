"""One page to look at: tables, figures, configuration and commands in a single file that fetches nothing."""

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from fczoo import __version__
from fczoo.federation.code import digest
from fczoo.reports.columns import GROUPS
from fczoo.reports.describe import describe, notes
from fczoo.reports.drawing import to_svg
from fczoo.reports.figures import figures, write_figures
from fczoo.reports.formats import number
from fczoo.reports.runs import Experiment, read_experiments
from fczoo.reports.tables import Table, make_table
from fczoo.reports.text import TEST
from fczoo.reports.words import setting_word


def write_page(places: Sequence[Path], out: Path, pictures: Path | None = None) -> None:
    """Write the page of the runs at or below some places, and their figures as PNG and PDF into ``pictures``.

    Raises FczooError without matplotlib and for places that hold no finished run.
    """
    experiments = read_experiments(places)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (files("fczoo.assets") / "report.html").read_text()
    )
    sections = [_section(e, i) for i, e in enumerate(experiments)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(template.render(sections=sections, version=__version__, test=TEST))
    if pictures:
        for i, experiment in enumerate(experiments):
            write_figures(experiment, pictures / f"{i + 1}" if len(experiments) > 1 else pictures)


def _section(experiment: Experiment, index: int) -> dict[str, Any]:
    tables = [make_table(experiment, names) for names in GROUPS]
    drawn = [
        (name, caption, Markup(to_svg(figure, f"{index} {name}")))
        for name, caption, figure in figures(experiment)
    ]
    return {
        "title": f"{experiment.settings['dataset']}, {experiment.about.partition['spec']}",
        "about": describe(experiment).split("\n"),
        "tables": [_table(t) for t in tables],
        "tested": any(len(line.seeds) > 1 for line in experiment.lines),
        "notes": notes(experiment),
        "figures": [f for f in drawn if not f[0].startswith(("matrix ", "why "))],
        "matrices": [f for f in drawn if f[0].startswith("matrix ")],
        "insights": [f for f in drawn if f[0].startswith("why ")],
        "settings": [(k, setting_word(k, v)) for k, v in experiment.settings.items()],
        "methods": [
            (line.label, [(k, setting_word(k, v)) for k, v in line.results[0].options.items()])
            for line in experiment.lines
        ],
        "facts": _facts(experiment),
        "commands": _commands(experiment),
    }


CARRYING_ON = re.compile(r" --(?:(?:no-)?(?:resume|accept-changed-code|skip-failed)|jobs[ =]\S+)(?= |$)")
NOTHING_ELSE = re.compile(r"\S+ bench(?: --out[ =](?:'[^']*'|\S+))?")


def _commands(experiment: Experiment) -> list[str]:
    """The commands behind the runs, as a shell takes them; those that carried on with the same runs, once."""
    commands: dict[str, None] = {}
    for about in (runs.about for runs in experiment.runs):
        for words in (*about.earlier_commands, about.command):
            told = CARRYING_ON.sub("", shlex.join(words))
            if told and not NOTHING_ELSE.fullmatch(told):
                commands[told] = None
    return list(commands)


def _table(table: Table) -> dict[str, Any]:
    arrows = {"high": "↑", "low": "↓", "": ""}
    head = [(c.name, arrows[c.better], c.meaning) for c in table.columns]
    rows = [
        (
            label,
            [
                (number(e, c), e.mark if e else "", bool(e and e.like_best))
                for e, c in zip(row, table.columns, strict=True)
            ],
            n,
        )
        for label, row, n in zip(table.labels, table.rows, table.seeds, strict=True)
    ]
    return {"head": head, "rows": rows}


def _facts(experiment: Experiment) -> list[tuple[str, str]]:
    """Versions, hardware and hashes, each once."""
    facts: dict[tuple[str, str], None] = {}
    for about in (runs.about for runs in experiment.runs):
        for name, value in {**about.versions, **about.hardware}.items():
            facts[name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)] = None
        facts["code sha256", digest(about.code) if about.code else ""] = None
        facts["device", about.device] = None
        facts["started", about.started or "not recorded"] = None
        facts["backbone sha256", about.backbone["sha256"]] = None
        facts["partition sha256", about.partition["sha256"]] = None
    return [(name, value) for name, value in facts if value]
