"""Warnings in a run folder: in its log, in a file of its own and of each run, and in ``bench.json``."""

import logging
from collections.abc import Collection
from pathlib import Path

from fczoo.reports.run_folder import LOG, WARNINGS, About, read_about, write_about
from fczoo.runner.progress import logged
from fczoo.runner.warnings import Warned, WarningRecorder, read_warnings, warning_lines

log = logging.getLogger("fczoo")


def add_warnings(folder: Path, warnings: Collection[Warned]) -> None:
    """Add warnings that were given before the folder was there; the terminal has them already."""
    WarningRecorder(folder / WARNINGS).add(*warnings)
    with logged(folder / LOG) as handler:
        for line in warning_lines(warnings):
            handler.handle(log.makeRecord(log.name, logging.WARNING, "", 0, line, (), None))
    describe_warnings(folder)


def describe_warnings(folder: Path) -> None:
    """Write the warnings of a run folder and of all its runs to its ``bench.json``."""
    about = read_about(folder)
    lines = _lines(folder, about)
    if lines != about.warnings:
        write_about(folder, {**about.plain(), "warnings": lines})


def _lines(folder: Path, about: About) -> list[str]:
    general = read_warnings(folder / WARNINGS)
    lines = warning_lines(general)
    texts = {warning.text for warning in general}
    for method in about.methods:
        own = [
            Warned(text, ", ".join(filter(None, (f"seed {seed}", where))))
            for seed in about.seeds
            for text, where in read_warnings(folder / method / f"seed{seed}" / WARNINGS)
            if text not in texts
        ]
        lines += [f"{method}: {line}" for line in warning_lines(own)]
    return lines
