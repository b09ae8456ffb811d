"""Command ``fczoo bench``."""

import time
from pathlib import Path
from typing import Any

import click

from fczoo.cli.arguments import EXECUTORS, KEEP_MODEL
from fczoo.cli.downloads import download_options
from fczoo.cli.message_options import message_options
from fczoo.cli.options import (
    COMMON_OPTIONS,
    OUTPUT,
    RUNS,
    GroupedCommand,
    complete,
    grouped_option,
    settings_options,
)
from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.registry import METHODS

REPEATABLE_OPTIONS = ("set", "sweep", "cluster")  # options that may be repeated


@click.command(cls=GroupedCommand, common_options=COMMON_OPTIONS)
@grouped_option(
    RUNS,
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of options, with [[cells]] for a grid, or the bench.json of a run folder; "
    "options on the command line override it",
)
@grouped_option(
    RUNS,
    "--methods",
    metavar="NAMES",
    shell_complete=complete(METHODS, ("all",)),
    help="Names of methods, separated by commas, or all; see `fczoo list methods`  "
    "[default: the protocol's]",
)
@grouped_option(
    RUNS,
    "--seeds",
    metavar="NUMBERS",
    help="Seeds of the runs, separated by commas; 0-4 means five  [default: the protocol's, or 0]",
)
@grouped_option(
    RUNS,
    "--set",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="Set an option of a method, listed by `fczoo show METHOD`; repeat it for more",
)
@grouped_option(
    RUNS,
    "--sweep",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Run each value of METHOD.FIELD or of a setting; if the option is repeated, all "
    "combinations are run",
)
@grouped_option(
    RUNS,
    "--zip/--no-zip",
    default=None,
    help="Pair the values of several --sweep in their order, instead of combining all  "
    "[default: off]",
)
@grouped_option(
    RUNS,
    "--tuned",
    metavar="FILE",
    type=click.Path(),
    help="Use the hyper-parameters in a tuned.json of `fczoo tune`; --set overrides them",
)
@settings_options()
@grouped_option(
    OUTPUT,
    "--out",
    metavar="FOLDER",
    type=click.Path(),
    help="Folder of the runs; runs that are finished there are not repeated  "
    "[default: results/run-DATE-TIME]",
)
@grouped_option(
    OUTPUT,
    "--resume/--no-resume",
    default=None,
    help="Complete the runs of --out or the newest results/run-*, with their options  "
    "[default: off]",
)
@grouped_option(
    OUTPUT,
    "--log",
    metavar="NAMES",
    shell_complete=complete(None, ("tensorboard", "wandb", "mlflow")),
    help="Also send metrics to tensorboard, wandb or mlflow  [default: no tracker]",
)
@grouped_option(
    OUTPUT,
    "--diagnostics/--no-diagnostics",
    default=None,
    help="Record the clients' predictions, confusion between tasks, and drift; takes longer  "
    "[default: off]",
)
@grouped_option(
    OUTPUT,
    "--keep-model",
    metavar="final|tasks|none",
    shell_complete=complete(None, KEEP_MODEL),
    help="Models that each run keeps in its folder for `fczoo predict`: the final one, one per "
    "task, or none  [default: final]",
)
@grouped_option(
    OUTPUT,
    "--no-keep-model",
    is_flag=True,
    default=None,
    help="Keep no model; the same as --keep-model none",
)
@grouped_option(
    OUTPUT,
    "--keep-server-state/--no-keep-server-state",
    default=None,
    help="Keep the server's state, which --start-from needs, in a file that only its owner can read"
    "  [default: on]",
)
@grouped_option(
    OUTPUT,
    "--dry-run/--no-dry-run",
    default=None,
    help="Print the configuration and estimates of work, traffic and memory; run nothing  "
    "[default: off]",
)
@grouped_option(
    OUTPUT,
    "--skip-failed/--no-skip-failed",
    default=None,
    help="Continue with the other runs after one has failed; the exit code is then not zero  "
    "[default: off]",
)
@grouped_option(
    OUTPUT,
    "--accept-changed-code/--no-accept-changed-code",
    default=None,
    help="Resume runs although the code has changed; bench.json records the change  [default: off]",
)
@grouped_option(
    OUTPUT,
    "--jobs",
    metavar="auto|NUMBER",
    help="Number of runs at the same time, each in its own process; auto: one per GPU, or per "
    "core without a GPU  [default: 1; on a cluster 1024]",
)
@grouped_option(
    OUTPUT,
    "--executor",
    metavar="cores|slurm|ray",
    shell_complete=complete(None, EXECUTORS),
    help="Where runs execute: on the cores of this machine, or on a Slurm or Ray cluster  "
    "[default: cores]",
)
@grouped_option(
    OUTPUT,
    "--cluster",
    multiple=True,
    metavar="KEY=VALUE",
    help="Resources of runs with --executor slurm or ray. Keys: threads; with Slurm any parameter "
    "of submitit, such as timeout_min; with Ray address, gpus and spread. threads and gpus are per "
    "run. spread=clients executes one run at a time and distributes its clients over --jobs "
    "workers; threads and gpus are then per worker. Repeat the option for more keys",
)
@message_options()
@download_options()
def bench(config: Path | None, **parameters: Any) -> None:
    """Run methods, in one or several settings, and print tables of results.

    --dataset and --partition take lists, separated by commas. Options with default none also accept
    the value none. If an option is given twice, the last value counts; --set, --sweep and --cluster
    can be repeated.
    """
    from fczoo.cli.arguments import (
        MAX_JOBS,
        parse_cluster,
        parse_executor,
        parse_jobs,
        parse_keep_model,
        parse_words,
        wrap_to_terminal,
    )
    from fczoo.cli.config import merge_requests, parse_request, read_config
    from fczoo.cli.downloads import find_missing, provide
    from fczoo.cli.models import describe_models
    from fczoo.cli.other_tools import single_seed_note
    from fczoo.cli.sweep import SETTINGS, add_keep_options, resume_sweep, sweep_of_file
    from fczoo.reports.runs import read_experiments
    from fczoo.reports.table_formats import sections
    from fczoo.reports.tables import SUMMARY_COLUMNS
    from fczoo.runner.configs import ExecutionConfig, store_paths
    from fczoo.runner.progress import print_progress
    from fczoo.runner.resume_checks import last_run
    from fczoo.runner.sweep import check_sweep, check_unique, run_sweep
    from fczoo.runner.trackers import LOGGERS, check_loggers

    option_values = {name: value for name, value in parameters.items() if value not in (None, ())}
    option_values |= {
        name: list(parameters[name]) for name in REPEATABLE_OPTIONS if parameters[name]
    }
    command = parse_request(option_values, parameters, "fczoo bench")
    if note := single_seed_note(command.get("seeds", "")):
        print_progress(note)
    common_options, cells = read_config(config, SETTINGS, parameters) if config else ({}, [])
    options = merge_requests(common_options, command)
    loggers = [match(name, LOGGERS) or name for name in parse_words(options.get("log"), "--log")]
    resume = options.get("resume", False)
    results = Path("results")
    if resume and "out" not in options:
        options["out"] = str(last_run(results))
    only_resume = (
        resume and not config and not options.keys() & {"methods", "protocol", "as_released"}
    )
    sweep = (
        resume_sweep(Path(options["out"]), command)
        if only_resume
        else sweep_of_file(common_options, cells, command)
    )
    if resume:
        options = add_keep_options(Path(options["out"]), options)
    keep = parse_keep_model(options)
    if options.get("dry_run"):
        from fczoo.runner.dry_run import dry_run

        check_loggers(loggers)
        check_unique(sweep)
        for number, (folder, runs) in enumerate(sweep.items(), 1):
            if len(sweep) > 1:
                print_progress(f"setting {number} of {len(sweep)}: {folder}")
            click.echo(("\n" if number > 1 else "") + dry_run(runs, keep))
        return
    out = Path(options.get("out", results / time.strftime("run-%Y%m%d-%H%M%S")))
    executor = parse_executor(options.get("executor", "cores"))
    execution = ExecutionConfig(
        resume=resume,
        skip_failed=options.get("skip_failed", False),
        loggers=tuple(loggers),
        diagnostics=options.get("diagnostics", False),
        jobs=parse_jobs(options.get("jobs", 1 if executor == "cores" else MAX_JOBS)),
        accept_changed_code=options.get("accept_changed_code", False),
        executor=executor,
        cluster=parse_cluster(parse_words(options.get("cluster"), "--cluster"), executor),
        keep_model=keep,
        keep_server_state=options.get("keep_server_state", True),
    )
    if missing := find_missing(runs[0].settings for runs in sweep.values()):
        check_sweep(sweep, out, execution)  # report errors of the command before any question
        provide(missing, options.get("download"))
    store_paths(out, sweep)
    folders, failure_count = run_sweep(sweep, out, execution)
    click.echo(
        wrap_to_terminal(
            f"{sections(read_experiments(folders), 'text', [SUMMARY_COLUMNS])}\n\nWritten to {out}"
            f"{describe_models(folders)}{_sweep_note(options, out)}"
        )
    )
    if failure_count:
        raise FczooError(
            f"{failure_count} of the runs failed; the table shows which and why, and the same "
            "command runs them again"
        )


def _sweep_note(options: dict[str, Any], out: Path) -> str:
    """Return a hint at the report of a sweep; empty without one."""
    return f"\nAccuracy by value: fczoo report {out} --sweep" if "sweep" in options else ""
