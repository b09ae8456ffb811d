"""The benchmark grid: data sets x partitions x methods x seeds, written to run folders as it goes."""

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
from fczoo.federation.benchmark import Bench
from fczoo.federation.code import code_of
from fczoo.federation.environment import command, hardware, versions
from fczoo.federation.precision import resolve_precision
from fczoo.federation.settings import AUTO, Settings
from fczoo.reports.contamination import contamination_of
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
from fczoo.reports.text import write_summary
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.clients_on_ray import clients_on_ray
from fczoo.runner.folder_warnings import add_warnings, describe_warnings
from fczoo.runner.lending import Lent, lend, shared_folder
from fczoo.runner.progress import Progress, logged, say
from fczoo.runner.resume import CLUSTER, LOCK, Interrupts, check_code, check_same, only_process
from fczoo.runner.run_cell import kept, run_cell
from fczoo.runner.schedule import warn_of_short_schedules
from fczoo.runner.trackers import check_loggers
from fczoo.runner.unused import warn_of_unused_settings
from fczoo.runner.warnings import Warned, WarningRecorder, earlier_warnings
from fczoo.runner.workers import check_executor, run_side_by_side

AS_EVER = Conduct()
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
        """The methods. Raises FczooError for any name or value that does not fit,
        before anything is loaded.
        """
        self.settings.check()
        return create_methods(self.methods, self.settings, self.options)


def by_seed(folder: Path, job: Job) -> dict[Path, Job]:
    """The job, or one for each seed in a folder of its own, where the seed moves more than training."""
    if job.settings.vary == ("training",):
        return {folder: job}
    return {folder / f"seed{s}": replace(job, settings=job.settings.seeded(s), seeds=(s,)) for s in job.seeds}


def run_grid(jobs: Mapping[Path, Job], out: Path, conduct: Conduct = AS_EVER) -> tuple[list[Path], int]:
    """Run all jobs, each in its folder below ``out``; returns these folders, and how many runs failed.

    A folder gets ``bench.json``, ``partition.json``, per run ``METHOD/seedN/result.json`` and
    ``rounds.jsonl``, and ``summary.{json,csv,md}``, brought up to date after each run. What an earlier
    command has finished there is kept and not run again, a broken run goes on after its last round, and one
    that failed, which left ``failed.json``, is tried again.

    Raises FczooError for input that cannot work, before anything is written, and for a folder that another
    process or configuration has; whatever a failing run raises, after what was finished is on disk, unless
    failures are skipped; and Interrupted after SIGINT or SIGTERM.
    """
    check_loggers(conduct.loggers)
    places = {out / folder: _with_precision(out / folder, job, conduct) for folder, job in jobs.items()}
    built = {folder: job.create() for folder, job in places.items()}
    _check_once(places, built)
    if conduct.resume and not any((place / ABOUT).is_file() for place in places):
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one there")
    for place in {out, *places}:
        _check_free(place, places)
    check_executor(conduct)
    earlier = earlier_warnings()

    @lru_cache(1)  # one setting is loaded once; of several, one at a time is in memory
    def opened(settings: Settings) -> tuple[Bench, Collection[Warned]]:
        with WarningRecorder() as recorder:
            return Bench.open(settings), recorder.warnings

    with ExitStack() as locks:
        for place in sorted({out, *places}):  # whoever runs a folder of the grid on its own meets its lock
            locks.enter_context(only_process(place))
        described, lent = [], dict[Settings, Lent]()
        lends = conduct.executor == "cores" and not conduct.in_turn
        shared = locks.enter_context(shared_folder()) if lends else None
        for folder, job in places.items():
            bench, given = opened(conduct.here(job.settings))
            with WarningRecorder() as recorder:
                recorder.add(*earlier, *given)
                about = _describe(folder, bench, built[folder], job, conduct)
                warn_of_short_schedules(job.settings, built[folder])
                warn_of_unused_settings(job.settings, built[folder])
            described.append((folder, about, bench.partition, recorder.warnings))
            if shared:
                lent[job.settings] = lend(bench, shared)
        for folder, about, partition, warnings in described:
            _begin(folder, about, partition, warnings)
            locks.callback(describe_warnings, folder)  # also of runs that are interrupted
        runs = [(f, job.settings, m, s) for f, job in places.items() for m in built[f] for s in job.seeds]
        names = {folder: _without_seed(folder.relative_to(out)) for folder in places}
        among = names if len(set(names.values())) > 1 else {}
        cells = [
            Cell(*run, n, len(runs), lent.get(run[1]), among.get(run[0], "")) for n, run in enumerate(runs, 1)
        ]
        for cell in cells:
            cell.place.mkdir(parents=True, exist_ok=True)
        progress = locks.enter_context(Progress(cells))

        def over(cell: Cell) -> None:
            _summarise(cell.folder)
            progress.ended(cell)

        if conduct.in_turn:
            workers = locks.enter_context(clients_on_ray(conduct, out)) if conduct.spreads_clients else None
            for cell in cells:
                with only_process(cell.place), Interrupts(out) as interrupts:
                    elsewhere = workers(cell) if workers else None
                    run_cell(cell, opened(cell.settings)[0], conduct, interrupts.obey, progress, elsewhere)
                over(cell)
        else:
            del bench
            opened.cache_clear()  # the workers map what was lent
            run_side_by_side(_unfinished(cells, over), conduct, out, over, progress.follow)
        for folder in places:
            _summarise(folder)  # a run may have been ended between its last result and the summary
    return list(places), sum((cell.place / FAILURE).exists() for cell in cells)


def _with_precision(folder: Path, job: Job, conduct: Conduct) -> Job:
    """Return a job with the precision that ``auto`` stands for: that of its folder, or the faster one.

    Raises FczooError on a cluster, whose processors are other ones.
    """
    if job.settings.precision != AUTO:
        return job
    if conduct.executor != "cores":
        raise FczooError(f"--precision {AUTO} would measure this machine, not the cluster; give fp32 or bf16")
    begun = (folder / ABOUT).is_file()
    settings = resolve_precision(job.settings)
    stored = read_about(folder).settings.get("precision", settings.precision) if begun else settings.precision
    return replace(job, settings=replace(settings, precision=stored))


def _without_seed(folder: Path) -> str:
    """A setting's folder; a run's seed is named in any case."""
    own = [part for part in folder.parts if not re.fullmatch(r"seed\d+", part)]
    return "/".join(own)


def _unfinished(cells: Sequence[Cell], over: Callable[[Cell], None]) -> list[Cell]:
    """The cells that are still to be run; ``over`` is told of the others."""
    rest = []
    for cell in cells:
        with logged(cell.folder / LOG):
            done = kept(cell)
        if done:
            over(cell)
        else:
            rest.append(cell)
    return rest


def folder_of(settings: Settings, grid: Sequence[Settings]) -> Path:
    """A level for the data set and one for the partition where the grid has several."""
    folder = Path()
    for name in ("dataset", "partition"):
        if len({getattr(s, name) for s in grid}) > 1:
            folder /= folder_name(getattr(settings, name))
    return folder


def folder_name(spec: str) -> str:
    """``dirichlet:0.5`` -> ``dirichlet_0.5``: a word of the command line as the name of a folder."""
    return (shorten(spec) or "").replace(":", "_")


def _check_once(places: Mapping[Path, Job], built: Mapping[Path, Sequence[Method]]) -> None:
    """Raise FczooError where two folders would get the same run: their tables could not be shown together."""
    seen: dict[tuple[Settings, Method, int], Path] = {}
    usual: dict[str, Any] = {f.name: f.default for f in fields(Settings) if f.name in WITHOUT_EFFECT}
    for folder, job in places.items():
        for method, seed in ((m, s) for m in built[folder] for s in job.seeds):
            other = seen.setdefault((replace(job.settings, **usual), method, seed), folder)
            if other != folder:
                raise FczooError(
                    f"{method.name} with seed {seed} would run in {other} and in {folder}; leave one out"
                )


def _check_free(folder: Path, places: Mapping[Path, Job]) -> None:
    """Raise FczooError when a folder holds something else than runs."""
    inner = {p for place in places for p in (place, *place.parents)}  # levels of the grid
    if (folder / ABOUT).is_file() or not folder.exists():
        return
    if not folder.is_dir() or any(
        p.name not in (LOCK, CLUSTER, f"{ABOUT}.tmp") and p not in inner for p in folder.iterdir()
    ):
        raise FczooError(f"output folder {folder} is already in use; give another with --out or remove it")


def _describe(
    folder: Path, bench: Bench, methods: Sequence[Method], job: Job, conduct: Conduct
) -> dict[str, Any]:
    """What ``bench.json`` will say.

    Raises FczooError for runs that cannot be made or do not belong to the folder.
    """
    for method in methods:
        bench.check(method)
    about: dict[str, Any] = {
        "methods": {m.name: asdict(m) for m in methods},
        "seeds": list(job.seeds),
        "settings": replace(bench.settings, device=job.settings.device).portable(),
        "backbone": {**asdict(bench.backbone.config), "sha256": bench.backbone.sha256},
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
        _joined(folder, read_about(folder).plain(), through_json(about), conduct.accept_changed_code)
        if (folder / ABOUT).is_file()
        else about
    )


def _images_of(stream: Stream) -> dict[str, Any]:
    """Describe the images for ``bench.json``: their hash and the remarks on them."""
    remarks = {"remarks": list(stream.remarks)} if stream.remarks else {}
    return {"sha256": data_sha256(stream), **remarks}


def _begin(folder: Path, about: dict[str, Any], partition: Partition, warnings: Collection[Warned]) -> None:
    """Write the folder's description, partition and first warnings.

    The description comes first: it says whose folder this is, should the process end here.
    """
    write_about(folder, about)
    partition.save(folder / PARTITION)
    if known := contamination_of(read_about(folder)):
        with logged(folder / LOG):
            say(f"{about['settings']['dataset']}: {known}")
    add_warnings(folder, warnings)


def _joined(folder: Path, old: dict[str, Any], new: dict[str, Any], accept: bool) -> dict[str, Any]:
    """The folder's description with further methods and seeds.

    Raises FczooError where the folder holds other runs, or other source began it and ``accept`` is not given.
    """
    changed = check_code(folder, old, new, accept)
    again = {m: new["methods"].get(m, options) for m, options in old["methods"].items()}
    before, now = old.get("tuned", {}), new.get("tuned", {})
    searched = {*before.get("methods", ()), *now.get("methods", ())}
    check_same(
        folder,
        {**old, "tuned": {**(before or now), "methods": []}},
        {**new, "tuned": {**(now or before), "methods": []}, "methods": again, "seeds": old["seeds"]},
    )
    commands = [
        *old.get("earlier_commands", []),
        *([old["command"]] if old.get("command", new["command"]) != new["command"] else []),
    ]
    joined = {**new, "methods": {**again, **new["methods"]}, "seeds": sorted({*old["seeds"], *new["seeds"]})}
    joined["code"] = {**old.get("code", {}), **new["code"]}
    accepted = [
        *old.get("changed_code", []),
        *([{"when": new["started"], "modules": changed}] if changed else []),
    ]
    tuned = {**(now or before), "methods": sorted(searched)} if searched else {}
    more = {"tuned": tuned, "earlier_commands": commands, "changed_code": accepted}
    more["warnings"] = old.get("warnings", [])
    return {**joined, **{name: value for name, value in more.items() if value}}


def _summarise(folder: Path) -> None:
    describe_warnings(folder)
    if any(c.result for c in read_cells(folder, read_about(folder))):
        write_summary(folder)


def create_methods(methods: Sequence[str], settings: Settings, options: Options) -> list[Method]:
    """Methods by name; ``options`` beat the protocol's values,
    which beat those for the data set and the defaults.
    """
    return [
        create_method(name, settings.dataset, **{**settings.method_options(name), **options.get(name, {})})
        for name in methods
    ]
