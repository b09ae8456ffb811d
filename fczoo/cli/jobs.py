"""Convert the options of a command to jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fczoo.cli.arguments import parse_cluster, parse_methods, parse_seeds, parse_specs, parse_words
from fczoo.cli.config import Request, default_protocol, merge_requests
from fczoo.cli.pointers import check_partitions
from fczoo.cli.tuned_values import read_tuned_values
from fczoo.core.errors import FczooError
from fczoo.core.options import flag, nearest
from fczoo.core.registry import METHODS
from fczoo.federation.settings import SEEDED_SETTINGS, Settings
from fczoo.runner.executors.ray import NEW
from fczoo.runner.grid import Job, by_seed, folder_name, folder_of

SETTINGS = [f.name for f in fields(Settings)]


def plan(shared: Request, cells: Sequence[Request], command: Request) -> dict[Path, Job]:
    """Return a job per folder from a settings file, its cells and the command line.

    Args:
        shared: Options of the file outside of cells.
        cells: Options of each cell.
        command: Options on the command line, which take precedence.

    Returns:
        Jobs by folder, relative to the run folder.

    Raises:
        FczooError: A name is unknown, or values do not fit.
    """
    names = [cell.get("name") or _name(cell) for cell in cells]
    jobs: dict[Path, Job] = {}
    for name, cell in zip(names or [""], cells or [{}], strict=True):
        if name and (Path(name).name != name or "\\" in name):
            raise FczooError(
                f"name = {name!r} of a cell cannot name a folder; use letters and digits"
            )
        for folder, job in jobs_of(merge_requests(shared, cell, command)).items():
            if name / folder in jobs:
                raise FczooError(f"two cells are called {name}; give each another name: name = ...")
            jobs[name / folder] = job
    running = {method for job in jobs.values() for method in job.methods}
    if stray := set(command["set"]) - running:
        raise FczooError(
            f"--set {min(stray)}.… names no method of this run ({', '.join(sorted(running))})"
        )
    for layer in (shared, *cells):
        for method in layer.get("set", {}):
            if METHODS.find(method) is None:
                raise FczooError(
                    f"set.{method} names no method; {nearest(method, METHODS.names())}"
                )
    return jobs


def jobs_of(request: Request) -> dict[Path, Job]:
    """Return the jobs of one merged request, by folder.

    Args:
        request: Options by name.

    Returns:
        Jobs by folder; one for each data set and partition, and with ``--vary`` for each seed.

    Raises:
        FczooError: An option is invalid.
    """
    setting_values: dict[str, Any] = {name: request[name] for name in SETTINGS if name in request}
    if "attackers" in setting_values and setting_values.get("attack", "none") == "none":
        raise FczooError(
            "--attackers is given without --attack, so no client would be hostile; give both or "
            "none"
        )
    on_other_machines = _on_other_machines(request)
    datasets, partitions = (
        parse_specs(setting_values.pop("dataset", "digits")),
        parse_specs(setting_values.pop("partition", None)),
    )
    check_partitions(partitions)
    if not datasets:
        raise FczooError("--dataset is empty; see `fczoo list datasets`")
    grid = [
        Settings.for_dataset(dataset, partition=partition, **setting_values, **protocol_setting)
        for dataset, protocol_setting in [
            (d, default_protocol(d, setting_values, on_other_machines)) for d in datasets
        ]
        for partition in partitions or (None,)
    ]
    jobs: dict[Path, Job] = {}
    for settings in dict.fromkeys(grid):  # two spellings of one partition are one setting
        source = next(
            iter(settings.sources.values()), None
        )  # the protocol, or the release without one
        methods = parse_methods(request.get("methods")) or list(source.proposes if source else ())
        if not methods:
            raise FczooError("no methods are named; give --methods, --protocol or --as-released")
        default_seeds = source.seeds.value if source else [0]
        seeds = parse_seeds(request["seeds"]) if "seeds" in request else default_seeds
        tuned_source = request.get("tuned")  # a file's name, or values of a run folder
        tuned_values = (
            read_tuned_values(Path(tuned_source)) if isinstance(tuned_source, str) else tuned_source
        )
        values = tuned_values.values if tuned_values else {}
        options = {m: {**values.get(m, {}), **request["set"].get(m, {})} for m in methods}
        folder = folder_of(settings, grid)
        if folder in jobs:
            raise FczooError(
                "two settings of the grid would share a folder; give partition files different "
                "names"
            )
        record = tuned_values.record(methods, request["set"], settings) if tuned_values else {}
        job = Job(settings, tuple(methods), tuple(seeds), options, record)
        _check_moved(job, setting_values)
        jobs |= by_seed(folder, job)
    return jobs


def _on_other_machines(request: Request) -> bool:
    """Return whether runs execute on other machines.

    They do with Slurm, and on a Ray cluster with an address.
    """
    executor = request.get("executor", "cores")
    cluster_options = dict(
        parse_cluster(parse_words(request.get("cluster"), "--cluster"), executor)
    )
    return executor == "slurm" or (executor == "ray" and cluster_options.get("address", NEW) != NEW)


def _check_moved(job: Job, given: Mapping[str, Any]) -> None:
    """Raise FczooError where a seed is set that ``--vary`` takes from ``--seeds``."""
    for field in map(SEEDED_SETTINGS.get, job.settings.vary):
        if field in given and {getattr(job.settings, str(field))} != set(job.seeds):
            raise FczooError(
                f"{flag(str(field))} is given, and --vary takes it from --seeds; leave one out"
            )


def _name(cell: Mapping[str, Any]) -> str:
    """Return the folder of a cell without a name, from its options."""
    options = {k: v for k, v in cell.items() if k != "set"}
    options |= {
        f"{method}.{k}": v for method, values in cell["set"].items() for k, v in values.items()
    }
    name = ",".join(f"{k}={folder_name(_folder_word(v))}" for k, v in options.items())
    if not name or len(name) > 100:
        raise FczooError(
            f"a cell with {len(options)} options needs a name for its folder: name = ..."
        )
    return name


def _folder_word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
