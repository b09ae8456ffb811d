"""Convert the options of a command, or an existing run folder, to a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fczoo.cli.arguments import parse_cluster, parse_methods, parse_seeds, parse_specs, parse_words
from fczoo.cli.axes import Axis, Row, check_axes, combine_axes, parse_axes, sweep_axes
from fczoo.cli.config import Request, default_protocol, merge_requests, request_of_run
from fczoo.cli.other_tools import check_partitions
from fczoo.core.errors import FczooError
from fczoo.core.files import read_json
from fczoo.core.options import flag, nearest, quote
from fczoo.core.registry import METHODS
from fczoo.federation.model_record import models_of, path_note, read_model_record
from fczoo.federation.settings import SEEDED_SETTINGS, Settings
from fczoo.reports.run_config import RunConfig
from fczoo.reports.run_folder import BENCH, read_bench_file
from fczoo.runner.configs import Sweep, folder_name, make_sweep, setting_folder
from fczoo.runner.executors.ray import LOCAL_CLUSTER
from fczoo.runner.tuned_file import read_tuned_values

SETTINGS = [f.name for f in fields(Settings)]


def sweep_of_file(shared: Request, cells: Sequence[Request], command: Request) -> Sweep:
    """Return the runs of a settings file, its cells and the command line.

    Args:
        shared: Options of the file outside cells.
        cells: Options of each cell.
        command: Options on the command line, which take precedence.

    Returns:
        Runs by folder, relative to the run folder.

    Raises:
        FczooError: A name is unknown, or a value is invalid.
    """
    names = [cell.get("name") or _name(cell) for cell in cells]
    axes, rows = _read_axes(shared, command)
    sweep: dict[Path, Sequence[RunConfig]] = {}
    for name, cell in zip(names or [""], cells or [{}], strict=True):
        if name and (Path(name).name != name or "\\" in name):
            raise FczooError(
                f"name = {name!r} of a cell is not a valid folder name; use letters and digits"
            )
        request = merge_requests(shared, cell, command)
        runs_by_folder = (
            sweep_axes(request, rows, sweep_of_request) if rows else sweep_of_request(request)
        )
        for folder, runs in runs_by_folder.items():
            if name / folder in sweep:
                raise FczooError(f"two cells are called {name}; give each another name: name = ...")
            sweep[name / folder] = runs
    run_methods = {config.method for runs in sweep.values() for config in runs}
    if unused_methods := set(command["set"]) - run_methods:
        raise FczooError(
            f"--set {min(unused_methods)}: {min(unused_methods)} is not a method of this run; "
            f"{nearest(min(unused_methods), run_methods)}"
        )
    # options on the command line take precedence over a sweep of the file
    check_axes(axes, (command,) if "sweep" in command else (shared, *cells, command), run_methods)
    for layer in (shared, *cells):
        for method in layer.get("set", {}):
            if METHODS.find(method) is None:
                raise FczooError(
                    f"set.{method}: no method is called {quote(method)}; "
                    f"{nearest(method, METHODS.names())}"
                )
    return sweep


def _read_axes(shared: Request, command: Request) -> tuple[list[Axis], list[Row]]:
    """Return the axes of ``--sweep`` and their rows; the command line overrides the file."""
    options = {**shared, **command}
    axes, zipped = parse_axes(options.get("sweep", ())), options.get("zip", False)
    if zipped and not axes:
        raise FczooError(
            "--zip is given without --sweep; give two or more --sweep options, or leave --zip out"
        )
    return axes, combine_axes(axes, zipped) if axes else []


def sweep_of_request(request: Request) -> Sweep:
    """Return the runs of one merged request, by folder.

    Args:
        request: Options by name.

    Returns:
        Runs by folder; one folder per data set and partition, and with ``--vary`` per seed.

    Raises:
        FczooError: An option is invalid.
    """
    setting_values: dict[str, Any] = {name: request[name] for name in SETTINGS if name in request}
    start = setting_values.get("start_from", "none")
    models = [read_model_record(folder) for folder in models_of(start)] if start != "none" else []
    if models and request.get("tuned"):
        raise FczooError("--start-from and --tuned both set options of methods; leave one out")
    if "attackers" in setting_values and setting_values.get("attack", "none") == "none":
        raise FczooError(
            "--attackers is given without --attack, so no client would be hostile; give both "
            "or neither"
        )
    uses_other_machines = _uses_other_machines(request)
    datasets, partitions = (
        parse_specs(
            setting_values.pop("dataset", models[0].dataset if models else "digits"), "--dataset"
        ),
        parse_specs(setting_values.pop("partition", None), "--partition"),
    )
    check_partitions(partitions)
    if not datasets:
        raise FczooError("--dataset is empty; see `fczoo list datasets`")
    grid = [
        Settings.for_dataset(dataset, partition=partition, **setting_values, **protocol_setting)
        for dataset, protocol_setting in [
            (d, {} if models else default_protocol(d, setting_values, uses_other_machines))
            for d in datasets
        ]
        for partition in partitions or (None,)
    ]
    sweep: dict[Path, Sequence[RunConfig]] = {}
    for settings in dict.fromkeys(grid):  # two spellings of one partition are the same setting
        # the protocol; without one, the release
        source = next(iter(settings.sources.values()), None)
        default_methods = list(dict.fromkeys(record.method for record in models))
        default_methods = default_methods or list(source.proposes if source else ())
        methods = parse_methods(request.get("methods")) or default_methods
        if not methods:
            raise FczooError("no methods are named; give --methods, --protocol or --as-released")
        default_seeds = sorted({record.seed for record in models})
        default_seeds = default_seeds or (source.seeds.value if source else [0])
        seeds = parse_seeds(request["seeds"]) if "seeds" in request else default_seeds
        tuned_source = request.get("tuned")  # name of a file, or values of a run folder
        tuned_values = (
            read_tuned_values(Path(tuned_source)) if isinstance(tuned_source, str) else tuned_source
        )
        values = tuned_values.values if tuned_values else {}
        options = {m: {**values.get(m, {}), **request["set"].get(m, {})} for m in methods}
        folder = setting_folder(settings, grid)
        if folder in sweep:
            raise FczooError(
                "two settings of the grid would share a run folder, because their files or folders "
                "have the same name; give them different names"
            )
        search = tuned_values.record(methods, request["set"], settings) if tuned_values else {}
        _check_varied_seeds(settings, seeds, setting_values)
        try:
            sweep |= make_sweep(folder, settings, methods, seeds, options, search)
        except FczooError as error:
            raise FczooError(f"{error}{_sweep_advice(str(error), request['set'])}") from error
    return sweep


def _sweep_advice(error: str, options: Mapping[str, Mapping[str, Any]]) -> str:
    """Return advice to use ``--sweep`` if an error is about a list of values in ``--set``."""
    for method, values in options.items():
        for option, value in values.items():
            if (
                isinstance(value, str)
                and "," in value
                and error.startswith(f"--set {method}.{option} ")
            ):
                return f"; for several values give --sweep {method}.{option}={value}"
    return ""


def resume_sweep(out: Path, command: Request) -> Sweep:
    """Return the runs of an existing run folder.

    Args:
        out: The run folder.
        command: Options on the command line, which take precedence.

    Returns:
        Runs by subfolder.

    Raises:
        FczooError: No run is found, or the command line gives several settings per folder.
    """
    if "sweep" in command:
        raise FczooError(
            "--resume without --methods only continues the runs of the folder; leave --sweep out, "
            "or add --methods, which also runs the sweep"
        )
    sweep: dict[Path, Sequence[RunConfig]] = {}
    paths = read_json(path_note(out), "note") if path_note(out).is_file() else {}
    for path in sorted(out.glob(f"**/{BENCH}")):
        folder = path.parent.relative_to(out)
        run_request = request_of_run(path)
        del run_request["data_root"]  # its last name is not a path
        paths_of_run = {**paths.get(str(folder), {}), "set": {}}
        runs = sweep_of_request(merge_requests(run_request, paths_of_run, command))
        if len(runs) != 1:
            raise FczooError(
                f"--resume runs the stored setting of {path.parent}; leave out lists of values"
            )
        (sweep[folder],) = runs.values()
    if not sweep:
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one")
    return sweep


def add_keep_options(out: Path, options: Request) -> Request:
    """Add to the options of a command that resumes which models and state the runs store.

    Args:
        out: The run folder.
        options: Options by name, which take precedence.
    """
    keep_settings = next(
        (read_bench_file(p.parent).keep for p in sorted(out.glob(f"**/{BENCH}"))), {}
    )
    if not keep_settings:
        return options
    has_choice = options.keys() & {"keep_model", "no_keep_model"}
    keep = {} if has_choice else {"keep_model": keep_settings["model"]}
    return {"keep_server_state": keep_settings["server_state"], **keep, **options}


def _uses_other_machines(request: Request) -> bool:
    """Return whether runs execute on other machines: with Slurm, or a Ray cluster's address."""
    executor = request.get("executor", "cores")
    cluster_options = dict(
        parse_cluster(parse_words(request.get("cluster"), "--cluster"), executor)
    )
    return executor == "slurm" or (
        executor == "ray" and cluster_options.get("address", LOCAL_CLUSTER) != LOCAL_CLUSTER
    )


def _check_varied_seeds(
    settings: Settings, seeds: Sequence[int], options: Mapping[str, Any]
) -> None:
    """Raise FczooError if a seed is set that ``--vary`` takes from ``--seeds``."""
    for field in map(SEEDED_SETTINGS.get, settings.vary):
        if field in options and {getattr(settings, str(field))} != set(seeds):
            raise FczooError(
                f"{flag(str(field))} is given, but --vary takes it from --seeds; leave one out"
            )


def _name(cell: Mapping[str, Any]) -> str:
    """Return the folder name of a cell without a name, from its options."""
    options = {k: v for k, v in cell.items() if k != "set"}
    options |= {
        f"{method}.{k}": v for method, values in cell["set"].items() for k, v in values.items()
    }
    name = ",".join(f"{k}={folder_name(_folder_word(v))}" for k, v in options.items())
    if not name or len(name) > 100:
        raise FczooError(
            f"a cell with {len(options)} options needs a folder name; add name = ... to it"
        )
    return name


def _folder_word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
