"""``fczoo bench --resume`` without anything else: a run folder knows its runs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fczoo.cli.config import Request, merged, request_of_run
from fczoo.cli.plan import jobs_of
from fczoo.core.errors import FczooError
from fczoo.core.files import home, read_json, shorten, write_json
from fczoo.reports.run_folder import ABOUT
from fczoo.runner.grid import Job

PLACES = ("data_root", "backbone", "partition")
"""Settings that name files and folders. A run folder keeps their last names alone, as it may be given away;
``FCZOO_HOME/begun`` keeps where they lay, for whoever began it."""


def resumed(out: Path, command: Request) -> dict[Path, Job]:
    """The jobs of a run folder that was begun before, by folder below it; the command line beats it.

    Raises FczooError where there is no run, and where the command line makes several of one.
    """
    jobs: dict[Path, Job] = {}
    places = read_json(_note(out), "note") if _note(out).is_file() else {}
    for about in sorted(out.glob(f"**/{ABOUT}")):
        folder = about.parent.relative_to(out)
        said = request_of_run(about)
        del said["data_root"]  # its last name leads nowhere
        found = list(jobs_of(merged(said, {**places.get(str(folder), {}), "set": {}}, command)).values())
        if len(found) != 1:
            raise FczooError(
                f"--resume goes on with one setting in {about.parent}; leave lists of others out"
            )
        jobs[folder] = found[0]
    if not jobs:
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one there")
    return jobs


def remember(out: Path, jobs: Mapping[Path, Job]) -> None:
    """Keep where the data and weights of some runs lie, where their folder does not say it."""
    notes = {}
    for folder, job in jobs.items():
        words = {name: getattr(job.settings, name) for name in PLACES}
        hidden = {name: word for name, word in words.items() if word != shorten(word)}
        if job.settings.root:
            hidden["data_root"] = str(job.settings.root.resolve())
        if hidden:
            notes[str(folder)] = hidden
    if notes:
        _note(out).parent.mkdir(parents=True, exist_ok=True)
        write_json(_note(out), notes)


def _note(out: Path) -> Path:
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:24]
    return home() / "begun" / f"{name}.json"
