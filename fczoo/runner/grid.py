"""The benchmark grid: data sets x partitions x methods x seeds, written to run folders."""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import shorten, through_json
from fczoo.core.method import Method
from fczoo.core.registry import create_method
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream, data_sha256
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.device import resolve_precision
from fczoo.federation.environment import code_of, command, hardware, versions
from fczoo.federation.settings import AUTO, Settings
from fczoo.reports.contamination import run_contamination
from fczoo.reports.formats import write_summary
from fczoo.reports.run_folder import (
    ABOUT,
    FAILURE,
    LOG,
    PARTITION,
    read_about,
    read_cells,
    write_about,
)
from fczoo.reports.runs import WITHOUT_EFFECT
from fczoo.runner.execute import add_warnings, describe_warnings, run_cell, skip_finished
from fczoo.runner.executors.base import check_executor, run_side_by_side
from fczoo.runner.executors.ray_clients import clients_on_ray
from fczoo.runner.progress import Progress, log_to_file, say
from fczoo.runner.resume import CLUSTER, LOCK, Interrupts, check_code, check_same, only_process
from fczoo.runner.run_spec import ExecutionConfig, RunSpec
from fczoo.runner.schedule import warn_of_short_schedules, warn_of_unused_settings
from fczoo.runner.shared_memory import SharedBenchmark, lend, shared_folder
from fczoo.runner.trackers import check_loggers
from fczoo.runner.warnings import LocatedWarning, WarningRecorder, earlier_warnings

AS_EVER = ExecutionConfig()
Options = Mapping[str, Mapping[str, Any]]  # method -> its hyper-parameters


@dataclass(frozen=True)
class Job:
    """The runs of one folder: methods and seeds in one setting."""

    settings: Settings
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    options: Options = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)  # how the options of --tuned were found

    def create(self) -> list[Method]:
        """Create the methods.

        Raises FczooError for invalid names or values before anything is loaded.
        """
        self.settings.check()
        return create_methods(self.methods, self.settings, self.options)


def by_seed(folder: Path, job: Job) -> dict[Path, Job]:
    """Return the job, or one per seed in its own folder if the seed varies more than training."""
    if job.settings.vary == ("training",):
        return {folder: job}
    return {
        folder / f"seed{s}": replace(job, settings=job.settings.with_seed(s), seeds=(s,))
        for s in job.seeds
    }


def check_grid(
    jobs: Mapping[Path, Job], out: Path, conduct: ExecutionConfig
) -> tuple[dict[Path, Job], dict[Path, list[Method]]]:
    """Check jobs before anything is loaded or written; return them and their methods by folder.

    Raises FczooError for wrong methods, options and loggers, and for folders that are in use.
    """
    check_loggers(conduct.loggers)
    places = {
        out / folder: _with_precision(out / folder, job, conduct) for folder, job in jobs.items()
    }
    built = {folder: job.create() for folder, job in places.items()}
    _check_once(places, built)
    if conduct.resume and not any((run_folder / ABOUT).is_file() for run_folder in places):
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one there")
    for run_folder in {out, *places}:
        _check_free(run_folder, places)
    check_executor(conduct)
    return places, built


def run_grid(
    jobs: Mapping[Path, Job], out: Path, conduct: ExecutionConfig = AS_EVER
) -> tuple[list[Path], int]:
    """Run all jobs in their folders below ``out``; return these and the number of failed runs.

    A folder gets ``bench.json``, ``partition.json``, per run ``METHOD/seedN/result.json`` and
    ``rounds.jsonl``, and ``summary.{json,csv,md}``, brought up to date after each run. What an
    earlier command has finished there is kept and not run again, a broken run resumes after its
    last round, and one that failed, which left ``failed.json``, is tried again.

    Raises FczooError for input that cannot work, before anything is written, and for a folder that
    another process or configuration has; whatever a failing run raises, after what was finished is
    on disk, unless failures are skipped; and Interrupted after SIGINT or SIGTERM.
    """
    places, built = check_grid(jobs, out, conduct)
    earlier = earlier_warnings()

    @lru_cache(1)  # one setting is loaded once; of several, one at a time is in memory
    def open_benchmark(settings: Settings) -> tuple[Benchmark, Collection[LocatedWarning]]:
        with WarningRecorder() as recorder:
            return Benchmark.open(settings), recorder.warnings

    with ExitStack() as locks:
        for run_folder in sorted(
            {out, *places}
        ):  # whoever runs a folder of the grid on its own meets its lock
            locks.enter_context(only_process(run_folder))
        descriptions, shared_benchmarks = [], dict[Settings, SharedBenchmark]()
        lends = conduct.executor == "cores" and not conduct.in_turn
        sharing_folder = locks.enter_context(shared_folder()) if lends else None
        for folder, job in places.items():
            bench, opening_warnings = open_benchmark(conduct.settings_of_this_process(job.settings))
            with WarningRecorder() as recorder:
                recorder.add(*earlier, *opening_warnings)
                about = _describe(folder, bench, built[folder], job, conduct)
                warn_of_short_schedules(job.settings, built[folder])
                warn_of_unused_settings(job.settings, built[folder])
            descriptions.append((folder, about, bench.partition, recorder.warnings))
            if sharing_folder:
                shared_benchmarks[job.settings] = lend(bench, sharing_folder)
        for folder, about, partition, warnings in descriptions:
            _begin(folder, about, partition, warnings)
            locks.callback(describe_warnings, folder)  # also of runs that are interrupted
        runs = [
            (f, job.settings, m, s)
            for f, job in places.items()
            for m in built[f]
            for s in job.seeds
        ]
        names = {folder: _without_seed(folder.relative_to(out)) for folder in places}
        among = names if len(set(names.values())) > 1 else {}
        cells = [
            RunSpec(*run, n, len(runs), shared_benchmarks.get(run[1]), among.get(run[0], ""))
            for n, run in enumerate(runs, 1)
        ]
        for cell in cells:
            cell.folder_of_run.mkdir(parents=True, exist_ok=True)
        progress = locks.enter_context(Progress(cells))

        def over(cell: RunSpec) -> None:
            _summarise(cell.folder)
            progress.count_ended(cell)

        if conduct.in_turn:
            workers = (
                locks.enter_context(clients_on_ray(conduct, out))
                if conduct.spreads_clients
                else None
            )
            for cell in cells:
                with only_process(cell.folder_of_run), Interrupts(out) as interrupts:
                    transport = workers(cell) if workers else None
                    run_cell(
                        cell,
                        open_benchmark(cell.settings)[0],
                        conduct,
                        interrupts.obey,
                        progress,
                        transport,
                    )
                over(cell)
        else:
            del bench
            open_benchmark.cache_clear()  # the workers map what was lent
            run_side_by_side(_remaining_runs(cells, over), conduct, out, over, progress.follow)
        for folder in places:
            _summarise(folder)  # a run may have been ended between its last result and the summary
    return list(places), sum((cell.folder_of_run / FAILURE).exists() for cell in cells)


def _with_precision(folder: Path, job: Job, conduct: ExecutionConfig) -> Job:
    """Return a job with the precision that ``auto`` selects: its folder's, or the faster one.

    Raises FczooError on a cluster, whose processors are other ones.
    """
    if job.settings.precision != AUTO:
        return job
    if conduct.executor != "cores":
        raise FczooError(
            f"--precision {AUTO} would measure this machine, not the cluster; give fp32 or bf16"
        )
    folder_precision = (
        read_about(folder).settings.get("precision") if (folder / ABOUT).is_file() else None
    )
    chosen = (
        replace(job.settings, precision=folder_precision)
        if folder_precision
        else resolve_precision(job.settings)
    )
    return replace(job, settings=chosen)


def _without_seed(folder: Path) -> str:
    """Return a setting's folder without the seed, which a run names in any case."""
    parts = [part for part in folder.parts if not re.fullmatch(r"seed\d+", part)]
    return "/".join(parts)


def _remaining_runs(cells: Sequence[RunSpec], over: Callable[[RunSpec], None]) -> list[RunSpec]:
    """Return the runs that are not finished; call ``over`` for the others."""
    remaining = []
    for cell in cells:
        with log_to_file(cell.folder / LOG):
            is_kept = skip_finished(cell)
        if is_kept:
            over(cell)
        else:
            remaining.append(cell)
    return remaining


def folder_of(settings: Settings, grid: Sequence[Settings]) -> Path:
    """Return a run's folder: one level per data set and per partition if there are several."""
    folder = Path()
    for name in ("dataset", "partition"):
        if len({getattr(s, name) for s in grid}) > 1:
            folder /= folder_name(getattr(settings, name))
    return folder


def folder_name(spec: str) -> str:
    """Convert a command-line value to a folder name: ``dirichlet:0.5`` -> ``dirichlet_0.5``."""
    return (shorten(spec) or "").replace(":", "_")


def _check_once(places: Mapping[Path, Job], built: Mapping[Path, Sequence[Method]]) -> None:
    """Raise FczooError where two folders would get the same run.

    Their tables could not be shown together.
    """
    first_folders: dict[tuple[Settings, Method, int], Path] = {}
    usual: dict[str, Any] = {
        f.name: f.default for f in fields(Settings) if f.name in WITHOUT_EFFECT
    }
    for folder, job in places.items():
        for method, seed in ((m, s) for m in built[folder] for s in job.seeds):
            first_folder = first_folders.setdefault(
                (replace(job.settings, **usual), method, seed), folder
            )
            if first_folder != folder:
                raise FczooError(
                    f"{method.name} with seed {seed} would run in {first_folder} and in "
                    f"{folder}; leave one out"
                )


def _check_free(folder: Path, places: Mapping[Path, Job]) -> None:
    """Raise FczooError when a folder holds something else than runs."""
    inner = {
        p for run_folder in places for p in (run_folder, *run_folder.parents)
    }  # levels of the grid
    if (folder / ABOUT).is_file() or not folder.exists():
        return
    if not folder.is_dir() or any(
        p.name not in (LOCK, CLUSTER, f"{ABOUT}.tmp") and p not in inner for p in folder.iterdir()
    ):
        raise FczooError(
            f"output folder {folder} is already in use; give another with --out or remove it"
        )


def _describe(
    folder: Path, bench: Benchmark, methods: Sequence[Method], job: Job, conduct: ExecutionConfig
) -> dict[str, Any]:
    """Return the content of ``bench.json``.

    Raises FczooError for runs that cannot be made or do not belong to the folder.
    """
    for method in methods:
        bench.check(method)
    about: dict[str, Any] = {
        "methods": {m.name: asdict(m) for m in methods},
        "seeds": list(job.seeds),
        "settings": replace(bench.settings, device=job.settings.device).portable(),
        "backbone": {**bench.backbone.config.record(), "sha256": bench.backbone.sha256},
        "partition": {"spec": bench.partition.spec, "sha256": bench.partition.sha256},
        "split": bench.stream.split,
        "data": _images_of(bench.stream),
        "device": conduct.device(job.settings),
        "hardware": {**hardware(), "threads": conduct.threads},
        "versions": versions(),
        "code": {k: v for method in methods for k, v in code_of(bench.settings, method).items()},
        **({"tuned": dict(job.tuned)} if job.tuned else {}),
        "command": command(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return (
        _merge_descriptions(
            folder, read_about(folder).plain(), through_json(about), conduct.accept_changed_code
        )
        if (folder / ABOUT).is_file()
        else about
    )


def _images_of(stream: Stream) -> dict[str, Any]:
    """Describe the images for ``bench.json``: their hash and the remarks on them."""
    remarks = {"remarks": list(stream.remarks)} if stream.remarks else {}
    return {"sha256": data_sha256(stream), **remarks}


def _begin(
    folder: Path, about: dict[str, Any], partition: Partition, warnings: Collection[LocatedWarning]
) -> None:
    """Write the folder's description, partition and first warnings.

    The description comes first: it says whose folder this is, should the process end here.
    """
    write_about(folder, about)
    partition.save(folder / PARTITION)
    if contamination := run_contamination(read_about(folder)):
        with log_to_file(folder / LOG):
            say(f"{about['settings']['dataset']}: {contamination}")
    add_warnings(folder, warnings)


def _merge_descriptions(
    folder: Path, old: dict[str, Any], new: dict[str, Any], accept: bool
) -> dict[str, Any]:
    """Return the folder's description with further methods and seeds.

    Raises FczooError where the folder holds other runs, or other source began it and ``accept`` is
    not given.
    """
    changed_modules = check_code(folder, old, new, accept)
    again = {m: new["methods"].get(m, options) for m, options in old["methods"].items()}
    old_search, new_search = old.get("tuned", {}), new.get("tuned", {})
    tuned_methods = {*old_search.get("methods", ()), *new_search.get("methods", ())}
    check_same(
        folder,
        {**old, "tuned": {**(old_search or new_search), "methods": []}},
        {
            **new,
            "tuned": {**(new_search or old_search), "methods": []},
            "methods": again,
            "seeds": old["seeds"],
        },
    )
    commands = [
        *old.get("earlier_commands", []),
        *([old["command"]] if old.get("command", new["command"]) != new["command"] else []),
    ]
    description = {
        **new,
        "methods": {**again, **new["methods"]},
        "seeds": sorted({*old["seeds"], *new["seeds"]}),
    }
    description["code"] = {**old.get("code", {}), **new["code"]}
    code_changes = [
        *old.get("changed_code", []),
        *([{"when": new["started"], "modules": changed_modules}] if changed_modules else []),
    ]
    search = (
        {**(new_search or old_search), "methods": sorted(tuned_methods)} if tuned_methods else {}
    )
    additions = {"tuned": search, "earlier_commands": commands, "changed_code": code_changes}
    additions["warnings"] = old.get("warnings", [])
    return {**description, **{name: value for name, value in additions.items() if value}}


def _summarise(folder: Path) -> None:
    describe_warnings(folder)
    if any(c.result for c in read_cells(folder, read_about(folder))):
        write_summary(folder)


def create_methods(methods: Sequence[str], settings: Settings, options: Options) -> list[Method]:
    """Create methods by name.

    ``options`` take precedence over the protocol's values, these over those of the data set.
    """
    return [
        create_method(
            name, settings.dataset, **{**settings.method_options(name), **options.get(name, {})}
        )
        for name in methods
    ]
