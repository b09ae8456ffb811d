"""``fczoo bench --resume`` without other options: a run folder holds the options of its runs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fczoo.cli.config import Request, merge_requests, request_of_run
from fczoo.cli.jobs import jobs_of
from fczoo.core.errors import FczooError
from fczoo.core.files import home, read_json, shorten, write_json
from fczoo.reports.run_folder import ABOUT
from fczoo.runner.grid import Job

PLACES = ("data_root", "backbone", "partition")
"""Settings that name files and folders. A run folder stores only their last names, as it may be
shared; ``FCZOO_HOME/begun`` stores their paths, on the machine that began the run.
"""


def resume_jobs(out: Path, command: Request) -> dict[Path, Job]:
    """Return the jobs of an existing run folder, by subfolder.

    Args:
        out: The run folder.
        command: Options on the command line, which take precedence.

    Returns:
        Jobs by subfolder.

    Raises:
        FczooError: No run exists, or the command line makes several jobs of one.
    """
    jobs: dict[Path, Job] = {}
    places = read_json(_note(out), "note") if _note(out).is_file() else {}
    for about in sorted(out.glob(f"**/{ABOUT}")):
        folder = about.parent.relative_to(out)
        run_request = request_of_run(about)
        del run_request["data_root"]  # its last name is not a path
        setting_jobs = list(
            jobs_of(
                merge_requests(run_request, {**places.get(str(folder), {}), "set": {}}, command)
            ).values()
        )
        if len(setting_jobs) != 1:
            raise FczooError(
                f"--resume continues with one setting in {about.parent}; leave lists of others out"
            )
        jobs[folder] = setting_jobs[0]
    if not jobs:
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one")
    return jobs


def store_paths(out: Path, jobs: Mapping[Path, Job]) -> None:
    """Store the paths of data and weights of some runs, where their folder does not have them.

    Args:
        out: The run folder.
        jobs: Jobs by subfolder.
    """
    notes = {}
    for folder, job in jobs.items():
        places = {name: getattr(job.settings, name) for name in PLACES}
        hidden = {name: value for name, value in places.items() if value != shorten(value)}
        if job.settings.root:
            hidden["data_root"] = str(job.settings.root.resolve())
        if hidden:
            notes[str(folder)] = hidden
    if notes:
        _note(out).parent.mkdir(parents=True, exist_ok=True)
        write_json(_note(out), notes)


def stored_paths(folder: Path) -> dict[str, str]:
    """Return the paths that ``store_paths`` stored for a run folder, by setting.

    Args:
        folder: Folder of one setting, in the folder of the whole bench or the same.
    """
    for out in (folder, *folder.resolve().parents):
        if _note(out).is_file():
            notes = read_json(_note(out), "note")
            paths: dict[str, str] = notes.get(str(folder.resolve().relative_to(out.resolve())), {})
            return paths
    return {}


def _note(out: Path) -> Path:
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:24]
    return home() / "begun" / f"{name}.json"
