"""Where the runs of a row come from: their commands, and all that their numbers depend on."""

import re
import shlex
from collections.abc import Mapping, Sequence

from fczoo.federation.code import digest
from fczoo.reports.run_folder import About
from fczoo.reports.runs import Line

CARRYING_ON = re.compile(r" --(?:(?:no-)?(?:resume|accept-changed-code|skip-failed)|jobs[ =]\S+)(?= |$)")
NOTHING_ELSE = re.compile(r"\S+ bench(?: --out[ =](?:'[^']*'|\S+))?")


def commands(abouts: Sequence[About]) -> list[str]:
    """The commands behind runs, as a shell takes them; those that carried on with the same runs, once."""
    found: dict[str, None] = {}
    for about in abouts:
        for words in (*about.earlier_commands, about.command):
            told = CARRYING_ON.sub("", shlex.join(words))
            if told and not NOTHING_ELSE.fullmatch(told):
                found[told] = None
    return list(found)


def facts(line: Line, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """The runs of a line, by ``names`` from their places, with versions, hardware and hashes, each once."""
    found: dict[str, dict[str, None]] = {}
    for cell, result in zip(line.cells, line.results, strict=True):
        about = cell.about
        versions = dict(result.versions or about.versions)
        code = versions.pop("code", digest(about.code) if about.code else "")
        told = {
            "run": names[cell.place],
            **versions,
            **about.hardware,
            "device": about.device,
            "started": about.started or "not recorded",
            "code sha256": code,
            "backbone sha256": about.backbone["sha256"],
            "partition sha256": about.partition["sha256"],
            "data sha256": about.data.get("sha256", ""),
        }
        for name, value in told.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.setdefault(name, {})[text] = None
    return [(name, text) for name, texts in found.items() for text in texts if text]
