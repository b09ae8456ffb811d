"""Execution of sweeps: data sets x partitions x methods x seeds, written to run folders."""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.registry import create_method
from fczoo.data.partition import Partition
from fczoo.data.partition_file import PARTITION
from fczoo.data.stream import data_sha256
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.device import resolve_precision
from fczoo.federation.diagnostics import check_diagnostics
from fczoo.federation.environment import code_of, command, hardware, versions
from fczoo.federation.settings import AUTO, Settings
from fczoo.reports.run_config import RunConfig
from fczoo.reports.run_folder import (
    BENCH,
    FAILURE,
    LOG,
    read_bench_file,
    read_run_records,
    write_bench_file,
)
from fczoo.reports.runs import normalize_settings
from fczoo.reports.table_formats import write_summary
from fczoo.runner.configs import (
    DEFAULT_EXECUTION,
    ExecutionConfig,
    RunSpec,
    Sweep,
    is_finished,
)
from fczoo.runner.execute import add_warnings, describe_warnings, execute_run, skip_finished
from fczoo.runner.executors import check_executor, run_in_parallel
from fczoo.runner.executors.ray_clients import clients_on_ray
from fczoo.runner.progress import Progress, log_to_file, print_progress
from fczoo.runner.resume_checks import check_code, check_same
from fczoo.runner.run_control import CLUSTER, LOCK, Interrupts, lock_folder
from fczoo.runner.schedule_warnings import warn_of_short_schedules, warn_of_unused_settings
from fczoo.runner.shared_memory import SharedBenchmark, share, shared_folder
from fczoo.runner.tracked_files import send_report
from fczoo.runner.trackers import check_loggers
from fczoo.runner.warnings import LocatedWarning, WarningRecorder, earlier_warnings


def check_sweep(
    sweep: Sweep, out: Path, execution: ExecutionConfig, allow_others: bool = False
) -> Sweep:
    """Check runs before anything is loaded or written; return them by the paths of their folders.

    With ``allow_others`` the folder ``out`` may contain other folders.

    Raises FczooError for invalid loggers or executors, duplicate runs, and folders in use.
    """
    check_loggers(execution.loggers)
    runs_by_folder = {
        out / folder: _set_precision(out / folder, configs, execution)
        for folder, configs in sweep.items()
    }
    check_unique(runs_by_folder)
    if execution.resume and not any((folder / BENCH).is_file() for folder in runs_by_folder):
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one there")
    for folder in {*runs_by_folder} if allow_others else {out, *runs_by_folder}:
        _check_free(folder, runs_by_folder)
    check_executor(execution)
    return runs_by_folder


def check_unique(sweep: Sweep) -> None:
    """Check that no two folders have the same run, so that their tables can be merged.

    Args:
        sweep: Runs by folder.

    Raises:
        FczooError: Two folders would get the same run.
    """
    first_folders: dict[tuple[Settings, str, str, int], Path] = {}
    for folder, configs in sweep.items():
        for config in configs:
            run = (
                normalize_settings(config.settings),
                config.method,
                repr(config.options),
                config.seed,
            )
            first_folder = first_folders.setdefault(run, folder)
            if first_folder != folder:
                raise FczooError(
                    f"{config.method} with seed {config.seed} would run in {first_folder} and in "
                    f"{folder}; leave one out"
                )


def run_sweep(
    sweep: Sweep,
    out: Path,
    execution: ExecutionConfig = DEFAULT_EXECUTION,
    on_end: Callable[[RunSpec], None] | None = None,
    allow_others: bool = False,
) -> tuple[list[Path], int]:
    """Execute all runs in their folders below ``out``; return these and the number of failed runs.

    A folder gets ``bench.json`` and ``partition.json``, per run ``METHOD/seedN/result.json`` and
    ``rounds.jsonl``, and ``summary.{json,csv,md}``, which are updated after each run. Runs that an
    earlier command finished are skipped, interrupted runs resume after their last round, and
    failed runs, which have a ``failed.json``, start again. ``on_end`` is called after each finished
    or failed run, when its files are written. With ``allow_others`` the folder ``out`` may contain
    other folders.

    Raises FczooError, before anything is written, for invalid input and for a folder of another
    process or configuration; the error of a failed run, unless failures are skipped; and
    InterruptedCommandError after SIGINT or SIGTERM.
    """
    sweep = check_sweep(sweep, out, execution, allow_others)
    earlier = earlier_warnings()

    @lru_cache(1)  # at most one benchmark is in memory
    def open_benchmark(
        settings: Settings,
    ) -> tuple[Benchmark, Collection[LocatedWarning], list[str]]:
        with WarningRecorder() as recorder, WarningRecorder(level=logging.INFO) as messages:
            bench = Benchmark.open(settings)
        notes = [m.text for m in messages.warnings if m not in recorder.warnings]
        return bench, recorder.warnings, notes

    with ExitStack() as stack:
        # one lock per folder, which excludes commands that run a single folder of the sweep
        for folder in sorted({out, *sweep}):
            stack.enter_context(lock_folder(folder))
        descriptions, shared_benchmarks = [], dict[Path, SharedBenchmark]()
        shares = execution.executor == "cores" and not execution.sequential
        sharing_folder = stack.enter_context(shared_folder()) if shares else None
        for folder, configs in sweep.items():
            settings = execution.settings_of_this_process(configs[0].settings)
            bench, opening_warnings, notes = open_benchmark(settings)
            with WarningRecorder() as recorder:
                recorder.add(*earlier, *opening_warnings)
                bench_file = _describe(folder, bench, configs, execution)
                warn_of_short_schedules(configs)
                warn_of_unused_settings(configs)
            descriptions.append((folder, bench_file, bench.partition, recorder.warnings, notes))
            if sharing_folder:
                shared_benchmarks[folder] = share(bench, sharing_folder)
        for folder, bench_file, partition, warnings, notes in descriptions:
            _write_folder(folder, bench_file, partition, warnings, notes)
            stack.callback(describe_warnings, folder)  # also after an interruption
        runs = _specify_runs(sweep, out, shared_benchmarks)
        for run in runs:
            run.folder_of_run.mkdir(parents=True, exist_ok=True)
        progress = stack.enter_context(Progress(runs))

        new_runs = list[RunSpec]()

        def end_run(run: RunSpec, skipped: bool = False) -> None:
            _summarise(run.folder)
            if not skipped:
                new_runs.append(run)
            progress.count_ended(run, skipped)
            if on_end:
                on_end(run)

        if execution.sequential:
            connect = (
                stack.enter_context(clients_on_ray(execution, out))
                if execution.distributes_clients
                else None
            )
            for run in runs:
                with lock_folder(run.folder_of_run), Interrupts(out) as interrupts:
                    bench = open_benchmark(run.config.settings)[0]
                    transport = connect(run) if connect else None
                    check = interrupts.check_interrupt
                    skipped = execute_run(run, bench, execution, check, progress, transport)
                end_run(run, skipped)
        else:
            del bench
            open_benchmark.cache_clear()  # the workers map the shared files
            remaining = _remaining_runs(runs, end_run)
            run_in_parallel(remaining, execution, out, end_run, progress.follow)
        for folder in sweep:
            _summarise(folder)  # a command may have ended between its last result and the summary
        if execution.loggers and any(map(is_finished, new_runs)):
            send_report(list(sweep), out, execution.loggers)
    return list(sweep), sum((run.folder_of_run / FAILURE).exists() for run in runs)


def _set_precision(
    folder: Path, configs: Sequence[RunConfig], execution: ExecutionConfig
) -> Sequence[RunConfig]:
    """Replace precision ``auto`` by that of the existing folder, or the faster one here.

    Raises FczooError on a cluster, whose processors may differ from this machine's.
    """
    settings = configs[0].settings
    if settings.precision != AUTO:
        return configs
    if execution.executor != "cores":
        raise FczooError(
            f"--precision {AUTO} would measure this machine, not the cluster; give fp32 or bf16"
        )
    folder_precision = (
        read_bench_file(folder).settings.get("precision") if (folder / BENCH).is_file() else None
    )
    resolved = (
        replace(settings, precision=folder_precision)
        if folder_precision
        else resolve_precision(settings)
    )
    return [replace(config, settings=resolved) for config in configs]


def _specify_runs(
    sweep: Sweep, out: Path, shared_benchmarks: Mapping[Path, SharedBenchmark]
) -> list[RunSpec]:
    """Return the runs of a sweep with their folders, numbers and labels."""
    names = {folder: setting_name(folder.relative_to(out)) for folder in sweep}
    has_several = len(set(names.values())) > 1
    runs = [(folder, config) for folder, configs in sweep.items() for config in configs]
    return [
        RunSpec(
            config,
            folder,
            number,
            len(runs),
            shared_benchmarks.get(folder),
            names[folder] if has_several else "",
        )
        for number, (folder, config) in enumerate(runs, 1)
    ]


def setting_name(folder: Path) -> str:
    """Return the name of a setting's folder without the seed, which each run's label contains.

    Args:
        folder: Run folder of the setting, relative to the command's folder.
    """
    parts = [part for part in folder.parts if not re.fullmatch(r"seed\d+", part)]
    return "/".join(parts)


def _remaining_runs(
    runs: Sequence[RunSpec], end_run: Callable[[RunSpec, bool], None]
) -> list[RunSpec]:
    """Return the runs that are not finished; call ``end_run`` for the others."""
    remaining = []
    for run in runs:
        with log_to_file(run.folder / LOG):
            skipped = skip_finished(run)
        if skipped:
            end_run(run, skipped)
        else:
            remaining.append(run)
    return remaining


def _check_free(folder: Path, run_folders: Iterable[Path]) -> None:
    """Raise FczooError if a folder contains something other than runs."""
    # folders of the sweep and their parents
    inner = {p for run_folder in run_folders for p in (run_folder, *run_folder.parents)}
    if (folder / BENCH).is_file() or not folder.exists():
        return
    if not folder.is_dir() or any(
        p.name not in (LOCK, CLUSTER) and not p.name.endswith(".json.tmp") and p not in inner
        for p in folder.iterdir()
    ):
        raise FczooError(
            f"output folder {folder} exists and is not a run folder; give another with --out"
        )


def _describe(
    folder: Path, bench: Benchmark, configs: Sequence[RunConfig], execution: ExecutionConfig
) -> dict[str, Any]:
    """Return the content of ``bench.json``.

    Raises FczooError for invalid runs, and for a folder with another configuration.
    """
    settings, options = configs[0].settings, {c.method: c.options for c in configs}
    methods = [create_method(name, **values) for name, values in options.items()]
    one_per_method = {config.method: config for config in configs}.values()
    for config in configs if settings.start_from else one_per_method:
        bench.check(config.create_method(), config.seed)
        if execution.diagnostics:
            check_diagnostics(config.create_method())
    search = next((config.search for config in configs if config.search), {})
    bench_file: dict[str, Any] = {
        "methods": options,
        "seeds": list(dict.fromkeys(config.seed for config in configs)),
        "settings": replace(bench.settings, device=settings.device).portable(),
        "backbone": {**bench.backbone.config.record(), "sha256": bench.backbone.sha256},
        "partition": {"spec": bench.partition.spec, "sha256": bench.partition.sha256},
        "split": bench.stream.split,
        "data": _data_of(bench),
        "device": execution.device(settings),
        "hardware": {**hardware(), "threads": execution.threads},
        "versions": versions(),
        "code": {k: v for method in methods for k, v in code_of(bench.settings, method).items()},
        **({"tuned": dict(search)} if search else {}),
        "keep": {"model": execution.keep_model, "server_state": execution.keep_server_state},
        "command": command(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return (
        _merge_descriptions(
            folder,
            read_bench_file(folder).plain(),
            through_json(bench_file),
            execution.accept_changed_code,
        )
        if (folder / BENCH).is_file()
        else bench_file
    )


def _data_of(bench: Benchmark) -> dict[str, Any]:
    """Describe the data for ``bench.json``: hash and remarks of the images, hash of the devices."""
    remarks = {"remarks": list(bench.stream.remarks)} if bench.stream.remarks else {}
    devices = {"devices": bench.devices.sha256} if bench.devices else {}
    return {"sha256": data_sha256(bench.stream), **remarks, **devices}


def _write_folder(
    folder: Path,
    bench_file: dict[str, Any],
    partition: Partition,
    warnings: Collection[LocatedWarning],
    notes: list[str],
) -> None:
    """Write the folder's description, partition, first notes and warnings.

    The description is first, so that the folder is identified if the process ends here.
    """
    write_bench_file(folder, bench_file)
    partition.save(folder / PARTITION)
    if contamination := read_bench_file(folder).contamination:
        notes = [*notes, f"{bench_file['settings']['dataset']}: {contamination}"]
    with log_to_file(folder / LOG):
        for note in notes:
            print_progress(note)
    add_warnings(folder, warnings)


def _merge_descriptions(
    folder: Path, old: dict[str, Any], new: dict[str, Any], accept: bool
) -> dict[str, Any]:
    """Add methods and seeds to the folder's description.

    Raises FczooError if the folder has another configuration, or if its source differs and
    ``accept`` is false.
    """
    changed_modules = check_code(folder, old, new, accept)
    updated_methods = {m: new["methods"].get(m, options) for m, options in old["methods"].items()}
    old_search, new_search = old.get("tuned", {}), new.get("tuned", {})
    tuned_methods = {*old_search.get("methods", ()), *new_search.get("methods", ())}
    old_settings = {**old, "tuned": {**(old_search or new_search), "methods": []}}
    new_settings = {**new, "tuned": {**(new_search or old_search), "methods": []}}
    check_same(
        folder, old_settings, {**new_settings, "methods": updated_methods, "seeds": old["seeds"]}
    )
    commands = [
        *old.get("earlier_commands", []),
        *([old["command"]] if old.get("command", new["command"]) != new["command"] else []),
    ]
    description = {
        **new,
        "methods": {**updated_methods, **new["methods"]},
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
    if any(c.result for c in read_run_records(folder, read_bench_file(folder))):
        write_summary(folder)
