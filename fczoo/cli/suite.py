"""Command ``fczoo suite``: run a suite, show its state, and write its page."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fczoo.cli.downloads import download_options
from fczoo.cli.options import DATA_FOLDER, ExampleGroup, GroupedCommand
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

if TYPE_CHECKING:
    from fczoo.reports.run_folder import RunRecord
    from fczoo.reports.suites import State, Suite, SuiteCell

RESULTS = click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results"),
    show_default=True,
    help="Folder that contains suites/NAME.toml and NAME.csv.",
)
PATHS = (
    click.option(
        "--data-root",
        metavar="FOLDER",
        help=f"Folder that contains the data sets.  {DATA_FOLDER}",
    ),
    click.option(
        "--backbone",
        metavar="FILE",
        help="Weight file of the suite's backbone, or NAME:FILE (NAME with weights of FILE).  "
        "[default: the suite's]",
    ),
)


@click.group(cls=ExampleGroup)
def suite() -> None:
    """Run, list and report suites: tables that one command rebuilds."""


def _add_paths(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(PATHS):
        command = option(command)
    return RESULTS(command)


@suite.command(cls=GroupedCommand)
@click.argument("name")
@_add_paths
@click.option(
    "--rows", metavar="NAMES", help="Run only these rows, separated by commas.  [default: all]"
)
@click.option(
    "--jobs",
    metavar="auto|NUMBER",
    default="1",
    show_default=True,
    help="Number of searches or runs at the same time; auto: one per GPU, or per core without a "
    "GPU.",
)
@click.option(
    "--executor",
    metavar="cores|slurm|ray",
    default="cores",
    show_default=True,
    help="Where runs execute; searches execute on this machine.",
)
@click.option(
    "--cluster",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set what a run requests on a cluster, such as threads=2; see `fczoo bench --help-all`; "
    "repeat it for more.",
)
@click.option(
    "--replicate",
    is_flag=True,
    help="Repeat the runs of rows that are current (neither missing nor outdated), without a new "
    "search; the results go to NAME.replication.csv, and `fczoo suite report` shows the "
    "differences.",
)
@download_options()
def run(
    name: str,
    results: Path,
    data_root: str | None,
    backbone: str | None,
    rows: str | None,
    jobs: str,
    executor: str,
    cluster: Sequence[str],
    replicate: bool,
    download: bool | None,
) -> None:
    """Tune and run the missing and outdated rows of suite NAME; the same command resumes.

    A row is outdated if its settings, options, search or code have changed since its runs.

    Each run is entered in results/NAME.csv as it ends. This file is enough to continue on another
    machine. Runs that another suite already has are copied from it.
    """
    from fczoo.cli.arguments import parse_cluster, parse_executor, parse_jobs, parse_words
    from fczoo.cli.downloads import find_missing, provide
    from fczoo.reports.suites import REPLICATION, RUNS
    from fczoo.runner.configs import ExecutionConfig
    from fczoo.runner.suite import run_suite

    chosen_suite, cells = _read(name, results, data_root, backbone, rows)
    pending = _pending_cells(chosen_suite, cells, results / f"{name}.csv", replicate)
    if pending and not replicate:
        pending = _copy_equal_runs(chosen_suite, pending, name, results)
    if not pending:
        state = "current" if not replicate else "missing or outdated; there is nothing to replicate"
        click.echo(f"all rows of {name} are {state}")
        return
    work = f"{name}{REPLICATION}" if replicate else name
    archive = results / f"{work}.csv"
    if missing := find_missing(cell.configs[0].settings for cell in pending):
        provide(missing, download)
    kind = parse_executor(executor)
    execution = ExecutionConfig(
        skip_failed=True,
        jobs=parse_jobs(jobs),
        executor=kind,
        cluster=parse_cluster(parse_words(list(cluster), "--cluster"), kind),
        keep_model="none",
        keep_server_state=False,
    )
    failures = run_suite(chosen_suite, pending, results / RUNS / work, archive, execution)
    click.echo(f"{archive} has the finished runs; see `fczoo suite report {name}`")
    if failures:
        raise FczooError(
            f"{plural(failures, 'run')} of {name} failed; failed.json below "
            f"{results / RUNS / work} has the reasons, and the same command retries"
        )


@suite.command(cls=GroupedCommand)
@click.argument("name")
@_add_paths
@click.option(
    "--estimate/--no-estimate",
    default=True,
    show_default=True,
    help="For rows without runs, estimate the time by measuring a training step on this machine.",
)
def status(
    name: str, results: Path, data_root: str | None, backbone: str | None, estimate: bool
) -> None:
    """List the rows of suite NAME: current, outdated, missing or failed, with the remaining time.

    Times are taken from earlier runs of the rows, or estimated, and include searches.
    """
    from fczoo.reports.suites import RUNS, archived_runs, find_equal_runs, other_archives
    from fczoo.reports.text_format import word_table
    from fczoo.runner.suite import failed_seeds
    from fczoo.runner.timing import duration_text

    chosen_suite, cells = _read(name, results, data_root, backbone, None)
    records, others = archived_runs(results / f"{name}.csv"), other_archives(results, name)
    states = _states(chosen_suite, cells, records)
    rows, remaining_seconds, unknown, total = [], 0.0, 0, Counter[str]()
    settings_with_features: set[Any] = set()  # features that an earlier row counted
    for cell, by_seed in zip(cells, states, strict=True):
        pending = [seed for seed, (state, _) in by_seed.items() if state != "current"]
        failures = failed_seeds(cell, chosen_suite, results / RUNS / name) if pending else set()
        states_of_row = Counter[str]()
        for seed, (state, reason) in by_seed.items():
            state_name = "failed" if seed in pending and seed in failures else state
            total[state_name] += 1
            states_of_row[f"outdated ({reason})" if state_name == "outdated" else state_name] += 1
        counts = ", ".join(f"{n} {state_name}" for state_name, n in states_of_row.items())
        time = ""
        if pending and (source := find_equal_runs(chosen_suite, cell, others)[0]):
            counts += f", in {source}"
        elif pending:
            run_seconds, features = _seconds_of_run(cell, records, estimate)
            searches = chosen_suite.search_share(cell) if len(pending) == len(by_seed) else 0.0
            seconds = run_seconds * (len(pending) + searches)
            is_counted = cell.configs[0].settings in settings_with_features
            if features and not is_counted:
                settings_with_features.add(cell.configs[0].settings)
                seconds += features * (len(pending) + bool(searches))
            unknown += not run_seconds + features
            remaining_seconds += seconds
            time = "included in another row's time" if features and is_counted else "unknown"
            time = duration_text(seconds) if seconds else time
        rows.append((cell.row.label, cell.row.role, cell.setting or "-", counts, time))
    click.echo(f"{name}: {chosen_suite.question}\n")
    click.echo(word_table(rows, ["row", "role", "setting", "runs", "remaining time"]))
    text = ", ".join(f"{n} {state_name}" for state_name, n in total.items())
    if remaining_seconds:
        text += f"; about {duration_text(remaining_seconds)} sequentially, including searches"
    if unknown:
        text += f"; time of {plural(unknown, 'row')} unknown"
    click.echo(f"\n{text}")


@suite.command(cls=GroupedCommand)
@click.argument("name")
@RESULTS
def report(name: str, results: Path) -> None:
    """Write the page of suite NAME from its archive: results/NAME.md, with its figures."""
    from fczoo.board.suite_page import write_page
    from fczoo.reports.suites import SUITES, read_suite

    page = write_page(name, read_suite(results / SUITES / f"{name}.toml"), results)
    click.echo(f"Written to {page}")


def _read(
    name: str, results: Path, data_root: str | None, backbone: str | None, rows: str | None
) -> "tuple[Suite, list[SuiteCell]]":
    """Return a suite and its cells, in the order of the file."""
    from fczoo.cli.arguments import parse_words
    from fczoo.core.options import nearest
    from fczoo.reports.suites import SUITES, read_suite

    path = results / SUITES / f"{name}.toml"
    chosen_suite = read_suite(path)
    labels = [row.label for row in chosen_suite.rows]
    chosen = parse_words(rows, "--rows") if rows is not None else labels
    if unknown := [label for label in chosen if label not in labels]:
        raise FczooError(f"{name} has no row {unknown[0]!r}; {nearest(unknown[0], labels)}")
    places = {"data_root": data_root, "backbone": backbone}
    local_settings = {key: value for key, value in places.items() if value is not None}
    return chosen_suite, [
        cell
        for row in chosen_suite.rows
        if row.label in chosen
        for cell in cells_of(chosen_suite, row, local_settings, str(path))
    ]


def cells_of(
    chosen_suite: "Suite", row: Any, local_settings: Mapping[str, Any], place: str
) -> "list[SuiteCell]":
    """Return the cells of a row, one per data set and partition.

    Args:
        chosen_suite: The suite.
        row: Row of the suite.
        local_settings: Settings of this machine: folder of the data, file of the backbone.
        place: File of the suite, for messages.
    """
    from fczoo.cli.config import merge_requests, parse_request
    from fczoo.cli.sweep import SETTINGS, sweep_of_request
    from fczoo.reports.suites import SuiteCell
    from fczoo.runner.sweep import setting_name

    common = parse_request(chosen_suite.bench, {*SETTINGS, "seeds"}, place)
    row_request: dict[str, Any] = {"methods": [row.method], "set": {row.method: row.set}}
    if row.seeds:
        row_request["seeds"] = row.seeds
    sweep = sweep_of_request(merge_requests(common, {"set": {}, **local_settings}, row_request))
    by_setting: dict[str, list[Any]] = {}
    for folder, configs in sweep.items():
        by_setting.setdefault(setting_name(folder), []).extend(configs)
    return [SuiteCell(row, setting, tuple(configs)) for setting, configs in by_setting.items()]


def _states(
    chosen_suite: "Suite", cells: "Sequence[SuiteCell]", records: "Mapping[str, RunRecord]"
) -> "list[dict[int, tuple[State, str]]]":
    """Return the state of each seed of each cell."""
    from fczoo.reports.suites import code_digest, state_of

    states = []
    for cell in cells:
        code = code_digest(cell.configs[0])
        states.append(
            {
                config.seed: state_of(
                    config,
                    cell.row,
                    chosen_suite,
                    records.get(cell.archive_name(config.seed)),
                    code,
                )
                for config in cell.configs
            }
        )
    return states


def _pending_cells(
    chosen_suite: "Suite", cells: "Sequence[SuiteCell]", archive: Path, replicate: bool
) -> "list[SuiteCell]":
    """Return the cells to run, with their seeds and a current run whose values they reuse."""
    from fczoo.reports.suites import archived_runs

    records, pending = archived_runs(archive), []
    for cell, by_seed in zip(cells, _states(chosen_suite, cells, records), strict=True):
        current = [seed for seed, (state, _) in by_seed.items() if state == "current"]
        seeds = current if replicate else [seed for seed in by_seed if seed not in current]
        if seeds:
            current_run = records[cell.archive_name(current[0])] if current else None
            pending.append(replace(cell, pending_seeds=tuple(seeds), archived_run=current_run))
    return pending


def _copy_equal_runs(
    chosen_suite: "Suite", pending: "list[SuiteCell]", name: str, results: Path
) -> "list[SuiteCell]":
    """Copy equal runs of other suites into the archive; return the cells that remain."""
    from fczoo.reports.suites import enter_runs, find_equal_runs, other_archives

    others, remaining = other_archives(results, name), []
    for cell in pending:
        source, found = find_equal_runs(chosen_suite, cell, others)
        if found:
            enter_runs(results / f"{name}.csv", found)
            click.echo(f"{cell.name}: {plural(len(found), 'run')} copied from {source}")
        else:
            remaining.append(cell)
    return remaining


def _seconds_of_run(
    cell: "SuiteCell", records: "Mapping[str, RunRecord]", estimate: bool
) -> tuple[float, float]:
    """Return the seconds of a run, and of features that rows share; (0, 0) if unknown.

    The former is the mean of the cell's archived runs, including outdated ones. Without runs both
    are estimated, if ``estimate`` is true.
    """
    results = [
        record.result
        for config in cell.configs
        if (record := records.get(cell.archive_name(config.seed)))
    ]
    seconds = [result.seconds for result in results if result]
    if seconds:
        return sum(seconds) / len(seconds), 0.0
    if not estimate:
        return 0.0, 0.0
    from fczoo.runner.dry_run import run_seconds

    return run_seconds(cell.configs[0]) or (0.0, 0.0)
