"""``fczoo bench``."""

import time
from pathlib import Path
from typing import Any

import click

from fczoo.cli.arguments import EXECUTORS
from fczoo.cli.options import OUTPUT, RUNS, GroupedCommand, complete, grouped, settings_options
from fczoo.core.errors import FczooError
from fczoo.core.names import match
from fczoo.core.registry import METHODS


@click.command(cls=GroupedCommand)
@grouped(
    RUNS,
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings file: TOML with these options and [[cells]] of a grid, or the bench.json of a run folder, "
    "which runs it again. The command line beats it.",
)
@grouped(
    RUNS,
    "--methods",
    metavar="NAMES",
    shell_complete=complete(METHODS, ("all",)),
    help="names, separated by commas, or all; see `fczoo list methods`  [the protocol's]",
)
@grouped(
    RUNS,
    "--seeds",
    metavar="SEEDS",
    help="training seeds, separated by commas; 0-4 are five  [the protocol's, or 0]",
)
@grouped(
    RUNS,
    "--set",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="hyper-parameter of a method; `fczoo show METHOD` has them all",
)
@grouped(
    RUNS,
    "--tuned",
    metavar="FILE",
    type=click.Path(),
    help="tuned.json of `fczoo tune`, whose values the methods take; --set beats it",
)
@settings_options()
@grouped(
    OUTPUT,
    "--out",
    metavar="FOLDER",
    type=click.Path(),
    help="run folder; one that holds part of the same runs is carried on  [results/run-DATE-TIME]",
)
@grouped(
    OUTPUT,
    "--resume/--no-resume",
    default=None,
    help="carry on in --out, or in the newest results/run-*, and begin nothing new; needs no other option",
)
@grouped(
    OUTPUT,
    "--log",
    metavar="NAMES",
    shell_complete=complete(None, ("tensorboard", "wandb", "mlflow")),
    help="tensorboard, wandb, mlflow: send the numbers there, too  [none]",
)
@grouped(
    OUTPUT,
    "--diagnostics/--no-diagnostics",
    default=None,
    help="also record what clients predict, confusion between tasks, drift; takes longer",
)
@grouped(
    OUTPUT,
    "--dry-run/--no-dry-run",
    default=None,
    help="print the whole configuration, its work, traffic and memory, and stop",
)
@grouped(
    OUTPUT,
    "--skip-failed/--no-skip-failed",
    default=None,
    help="carry on after a run that fails; the exit code tells",
)
@grouped(
    OUTPUT,
    "--accept-changed-code/--no-accept-changed-code",
    default=None,
    help="go on in a folder whose runs other code began; bench.json keeps which",
)
@grouped(
    OUTPUT,
    "--jobs",
    metavar="auto|int",
    help="runs side by side, each in a process of its own with its share of the cores; auto: one a core "
    "or GPU; on a cluster, runs in its queue at one time, or workers for clients  [1; on a cluster all]",
)
@grouped(
    OUTPUT,
    "--executor",
    metavar="cores|slurm|ray",
    shell_complete=complete(None, EXECUTORS),
    help="where the runs go on: this machine's cores and GPUs, or a Slurm or Ray cluster  [cores]",
)
@grouped(
    OUTPUT,
    "--cluster",
    multiple=True,
    metavar="KEY=VALUE",
    help="what a run asks of the cluster: threads; for Slurm submitit's parameters, such as timeout_min, "
    "slurm_partition, gpus_per_node; for Ray address, gpus and spread=clients: the clients of each round, "
    "not the runs, are shared out",
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
