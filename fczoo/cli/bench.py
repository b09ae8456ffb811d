"""``fczoo bench``."""

import time
from pathlib import Path
from typing import Any

import click

from fczoo.cli.arguments import EXECUTORS
from fczoo.cli.examples import COMMON
from fczoo.cli.options import OUTPUT, RUNS, GroupedCommand, complete, grouped, settings_options
from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.registry import METHODS


@click.command(cls=GroupedCommand, common=COMMON)
@grouped(
    RUNS,
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings file: TOML with these options and [[cells]] of a grid, or the bench.json of a run folder "
    "to run again. Options on the command line override it",
)
@grouped(
    RUNS,
    "--methods",
    metavar="NAMES",
    shell_complete=complete(METHODS, ("all",)),
    help="Names of methods, separated by commas, or all; see `fczoo list methods`  [default: the protocol's]",
)
@grouped(
    RUNS,
    "--seeds",
    metavar="NUMBERS",
    help="Seeds of the runs, separated by commas; 0-4 are five  [default: the protocol's, or 0]",
)
@grouped(
    RUNS,
    "--set",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="Option of a method; `fczoo show METHOD` lists all; may be given several times",
)
@grouped(
    RUNS,
    "--tuned",
    metavar="FILE",
    type=click.Path(),
    help="Take the values of a tuned.json that `fczoo tune` wrote; --set overrides them",
)
@settings_options()
@grouped(
    OUTPUT,
    "--out",
    metavar="FOLDER",
    type=click.Path(),
    help="Run folder; one that holds part of the same runs is continued  [default: results/run-DATE-TIME]",
)
@grouped(
    OUTPUT,
    "--resume/--no-resume",
    default=None,
    help="Continue the runs in --out, or in the newest results/run-*; start no new run",
)
@grouped(
    OUTPUT,
    "--log",
    metavar="NAMES",
    shell_complete=complete(None, ("tensorboard", "wandb", "mlflow")),
    help="Send the numbers to tensorboard, wandb or mlflow as well  [default: none]",
)
@grouped(
    OUTPUT,
    "--diagnostics/--no-diagnostics",
    default=None,
    help="Record predictions of clients, confusion between tasks and drift; takes longer",
)
@grouped(
    OUTPUT,
    "--dry-run/--no-dry-run",
    default=None,
    help="Print the configuration with its work, traffic and memory, and stop",
)
@grouped(
    OUTPUT,
    "--skip-failed/--no-skip-failed",
    default=None,
    help="Continue after a run that fails; the exit code is then not zero",
)
@grouped(
    OUTPUT,
    "--accept-changed-code/--no-accept-changed-code",
    default=None,
    help="Continue a folder that other code began; bench.json records the change",
)
@grouped(
    OUTPUT,
    "--jobs",
    metavar="auto|NUMBER",
    help="Number of runs side by side, each in its own process; auto: one per core or GPU. On a cluster: "
    "runs in its queue, or workers for clients  [default: 1; on a cluster all]",
)
@grouped(
    OUTPUT,
    "--executor",
    metavar="cores|slurm|ray",
    shell_complete=complete(None, EXECUTORS),
    help="Where runs execute: on this machine, or on a Slurm or Ray cluster  [default: cores]",
)
@grouped(
    OUTPUT,
    "--cluster",
    multiple=True,
    metavar="KEY=VALUE",
    help="Resource that a run asks of the cluster: threads; for Slurm submitit's parameters, such as "
    "timeout_min; for Ray address, gpus and spread=clients (distributes clients, not runs)",
)
def bench(config: Path | None, **given: Any) -> None:
    """Run methods on one data stream, or on each of a grid of them, and print their tables.

    --dataset and --partition take lists, separated by commas.
    """
    from fczoo.cli.arguments import MOST_JOBS, parse_cluster, parse_executor, parse_jobs, words
    from fczoo.cli.config import merged, read_config, request
    from fczoo.cli.plan import SETTINGS, plan
    from fczoo.cli.pointers import one_seed
    from fczoo.cli.resumed import remember, resumed
    from fczoo.cli.terminal import fitted
    from fczoo.reports.columns import SHORT
    from fczoo.reports.runs import read_experiments
    from fczoo.reports.text import sections
    from fczoo.runner.cell import Conduct
    from fczoo.runner.grid import run_grid
    from fczoo.runner.resume import last_run
    from fczoo.runner.trackers import LOGGERS, check_loggers

    said = {name: value for name, value in given.items() if value not in (None, ())}
    said |= {name: list(given[name]) for name in ("set", "cluster") if given[name]}
    command = request(said, given, "fczoo bench")
    if note := one_seed(command.get("seeds", "")):
        click.echo(note, err=True)
    shared, cells = read_config(config, SETTINGS, given) if config else ({}, [])
    wishes = merged(shared, command)
    loggers = [match(name, LOGGERS) or name for name in words(wishes.get("log"), "--log")]
    resume = wishes.get("resume", False)
    results = Path("results")
    if resume and "out" not in wishes:
        wishes["out"] = str(last_run(results))
    alone = resume and not config and not wishes.keys() & {"methods", "protocol", "as_released"}
    jobs = resumed(Path(wishes["out"]), command) if alone else plan(shared, cells, command)
    if wishes.get("dry_run"):
        from fczoo.runner.dry_run import dry_run

        check_loggers(loggers)
        click.echo("\n\n".join(map(dry_run, jobs.values())))
        return
    out = Path(wishes.get("out", results / time.strftime("run-%Y%m%d-%H%M%S")))
    executor = parse_executor(wishes.get("executor", "cores"))
    conduct = Conduct(
        resume=resume,
        skip_failed=wishes.get("skip_failed", False),
        loggers=tuple(loggers),
        diagnostics=wishes.get("diagnostics", False),
        jobs=parse_jobs(wishes.get("jobs", 1 if executor == "cores" else MOST_JOBS)),
        accept_changed_code=wishes.get("accept_changed_code", False),
        executor=executor,
        cluster=parse_cluster(words(wishes.get("cluster"), "--cluster"), executor),
    )
    remember(out, jobs)
    folders, failed = run_grid(jobs, out, conduct)
    click.echo(fitted(f"{sections(read_experiments(folders), 'text', [SHORT])}\n\nWritten to {out}"))
    if failed:
        raise FczooError(
            f"{failed} of the runs failed; the table says which and why, and the same command tries them "
            "again"
        )
