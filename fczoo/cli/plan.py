"""From the options of a command to the jobs that it means."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fczoo.cli.arguments import methods_named, parse_cluster, parse_seeds, specs, words
from fczoo.cli.config import Request, merged
from fczoo.cli.followed import followed_here
from fczoo.cli.found import found_in_file
from fczoo.cli.pointers import check_partitions
from fczoo.core.errors import FczooError
from fczoo.core.options import flag, nearest
from fczoo.core.registry import METHODS
from fczoo.federation.settings import MOVED, Settings
from fczoo.runner.grid import Job, by_seed, folder_name, folder_of
from fczoo.runner.on_ray import NEW

SETTINGS = [f.name for f in fields(Settings)]


def plan(shared: Request, cells: Sequence[Request], command: Request) -> dict[Path, Job]:
    """A job for each folder below the run's own: of the settings file,
    its cells and the command line, which beats both.

    Raises FczooError for unknown names and values that do not fit.
    """
    names = [cell.get("name") or _name(cell) for cell in cells]
    jobs: dict[Path, Job] = {}
    for name, cell in zip(names or [""], cells or [{}], strict=True):
        if name and (Path(name).name != name or "\\" in name):
            raise FczooError(f"name = {name!r} of a cell cannot name a folder; take letters and digits")
        for folder, job in jobs_of(merged(shared, cell, command)).items():
            if name / folder in jobs:
                raise FczooError(f"two cells are called {name}; give each a name of its own: name = ...")
            jobs[name / folder] = job
    running = {method for job in jobs.values() for method in job.methods}
    if stray := set(command["set"]) - running:
        raise FczooError(f"--set {min(stray)}.… names no method of this run ({', '.join(sorted(running))})")
    for layer in (shared, *cells):
        for method in layer.get("set", {}):
            if METHODS.find(method) is None:
                raise FczooError(f"set.{method} names no method; {nearest(method, METHODS.names())}")
    return jobs


def jobs_of(request: Request) -> dict[Path, Job]:
    """The jobs that one layer of options means, by folder. Raises FczooError for what does not fit."""
    given: dict[str, Any] = {name: request[name] for name in SETTINGS if name in request}
    if "attackers" in given and given.get("attack", "none") == "none":
        raise FczooError(
            "--attackers is given without --attack, so nobody would be hostile; give both or none"
        )
    elsewhere = _elsewhere(request)
    datasets, partitions = specs(given.pop("dataset", "digits")), specs(given.pop("partition", None))
    check_partitions(partitions)
    if not datasets:
        raise FczooError("--dataset is empty; see `fczoo list datasets`")
    grid = [
        Settings.for_dataset(dataset, partition=partition, **given, **followed)
        for dataset, followed in [(d, followed_here(d, given, elsewhere)) for d in datasets]
        for partition in partitions or (None,)
    ]
    jobs: dict[Path, Job] = {}
    for settings in dict.fromkeys(grid):  # two spellings of one partition are one setting
        source = next(iter(settings.followed.values()), None)  # the protocol, or the release without one
        methods = methods_named(request.get("methods")) or list(source.proposes if source else ())
        if not methods:
            raise FczooError("no methods are named; give --methods, --protocol or --as-released")
        proposed = source.seeds.value if source else [0]
        seeds = parse_seeds(request["seeds"]) if "seeds" in request else proposed
        tuned = request.get("tuned")  # a file's name, or what a run folder has of one
        found = found_in_file(Path(tuned)) if isinstance(tuned, str) else tuned
        values = found.values if found else {}
        options = {m: {**values.get(m, {}), **request["set"].get(m, {})} for m in methods}
        folder = folder_of(settings, grid)
        if folder in jobs:
            raise FczooError(
                "two settings of the grid would share a folder; give partition files different names"
            )
        record = found.record(methods, request["set"], settings) if found else {}
        job = Job(settings, tuple(methods), tuple(seeds), options, record)
        _check_moved(job, given)
        jobs |= by_seed(folder, job)
    return jobs


def _elsewhere(request: Request) -> bool:
    """Whether runs go on on other machines: Slurm's, or those of a Ray cluster that has an address."""
    executor = request.get("executor", "cores")
    asked = dict(parse_cluster(words(request.get("cluster"), "--cluster"), executor))
    return executor == "slurm" or (executor == "ray" and asked.get("address", NEW) != NEW)


def _check_moved(job: Job, given: Mapping[str, Any]) -> None:
    """Raise FczooError where a seed is given that ``--vary`` takes from ``--seeds``."""
    for field in map(MOVED.get, job.settings.vary):
        if field in given and {getattr(job.settings, str(field))} != set(job.seeds):
            raise FczooError(f"{flag(str(field))} is given, and --vary takes it from --seeds; leave one out")


def _name(cell: Mapping[str, Any]) -> str:
    """A cell's folder, where it has no name: what it says other than the rest of the file."""
    said = {k: v for k, v in cell.items() if k != "set"}
    said |= {f"{method}.{k}": v for method, values in cell["set"].items() for k, v in values.items()}
    name = ",".join(f"{k}={folder_name(_word(v))}" for k, v in said.items())
    if not name or len(name) > 100:
        raise FczooError(f"a cell that says {len(said)} things needs a name for its folder: name = ...")
    return name


def _word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
