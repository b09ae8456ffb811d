"""``fczoo tune``."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from fczoo.cli.examples import COMMON
from fczoo.cli.options import OUTPUT, RUNS, GroupedCommand, complete, grouped, settings_options
from fczoo.core.registry import DATASETS, METHODS
from fczoo.federation.settings import Settings

OF_ITS_OWN = ("class_order", "class_order_seed", "partition_seed", "vary")  # settings of which --seed decides


@click.command(cls=GroupedCommand, common=COMMON)
@grouped(
    RUNS,
    "--methods",
    metavar="NAMES",
    required=True,
    shell_complete=complete(METHODS, ("all",)),
    help="Names of methods, separated by commas, or all; see `fczoo list methods`",
)
@grouped(
    RUNS,
    "--set",
    "changes",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="Option of a method that is not searched: all trials use this value",
)
@grouped(
    RUNS,
    "--trials",
    type=click.IntRange(1, 10_000),
    default=16,
    help="Number of trials per method  [default: 16]",
)
@grouped(
    RUNS,
    "--first-tasks",
    type=click.IntRange(1),
    help="Number of tasks per trial, the first ones  [default: 3, or all of fewer]",
)
@grouped(
    RUNS,
    "--held-out",
    type=click.FloatRange(0.01, 0.9),
    default=0.2,
    help="Part of the training images that scores a trial  [default: 0.2]",
)
@grouped(
    RUNS,
    "--score-per-class",
    type=click.IntRange(1),
    help="Number of training images per class that score a trial, instead of --held-out",
)
@grouped(
    RUNS,
    "--seed",
    type=click.IntRange(0),
    default=0,
    help="Seed of class order, split and training  [default: 0]",
)
@settings_options([field.name for field in fields(Settings) if field.name not in OF_ITS_OWN])
@grouped(
    OUTPUT,
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the trials and tuned.json; the same command continues there",
)
@grouped(
    OUTPUT,
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a figure, such as FILE.png, of how much each option matters",
)
@grouped(
    OUTPUT, "--jobs", metavar="auto|NUMBER", default="1", help="Number of methods side by side  [default: 1]"
)
def tune(
    methods: str,
    changes: Sequence[str],
    trials: int,
    first_tasks: int | None,
    held_out: float,
    score_per_class: int | None,
    seed: int,
    out: Path,
    plot: Path | None,
    jobs: str,
    **given: Any,
) -> None:
    """Search the options of each method with the same effort, on no test image; see `fczoo bench --tuned`."""
    from fczoo.cli.arguments import ALL, methods_named, parse_changes, parse_jobs, specs
    from fczoo.cli.followed import followed_here
    from fczoo.cli.pictures import check_plot, write_importance
    from fczoo.cli.pointers import check_partitions
    from fczoo.core.errors import FczooError
    from fczoo.core.options import plural, spaces
    from fczoo.federation.precision import resolve_precision
    from fczoo.reports.words import early_tasks, option_word, word_table
    from fczoo.runner.search import tune as search
    from fczoo.runner.study import ERROR
    from fczoo.runner.trials import Effort
    from fczoo.runner.tuning import TUNED

    if plot is not None:
        check_plot(plot)
    dataset = DATASETS.canonical_name(given.pop("dataset") or "digits")
    said = {name: value for name, value in given.items() if value is not None}
    check_partitions(specs(said.get("partition")))
    settings = Settings.for_dataset(dataset, **said, **followed_here(dataset, said))
    settings = resolve_precision(settings)
    settings.check()
    named, fixed = methods_named(methods), parse_changes(changes)
    if not named:
        raise FczooError("no methods are named; give --methods a name, or all")
    searched = [name for name in named if methods != ALL or spaces(METHODS.get(name))]
    if others := sorted(fixed.keys() - searched):
        raise FczooError(f"--set names {', '.join(others)}, not among --methods; add or leave out")
    if first_tasks is not None and first_tasks > settings.task_count:
        raise FczooError(
            f"--first-tasks is {first_tasks}; {dataset} is cut into {settings.task_count}: give fewer, or "
            "raise --tasks"
        )
    effort = Effort(trials, first_tasks or Effort.tasks, held_out, score_per_class, seed)
    tuned = search(searched, settings, effort, out, parse_jobs(jobs), fixed)
    rows = []
    for name, found in tuned.methods.items():
        values = ", ".join(f"{k}={option_word(_short(v))}" for k, v in found.values.items())
        searched_for = {k: v for k, v in found.importance.items() if k not in fixed.get(name, {})}
        share = ", ".join(f"{k} {100 * v:.0f} %" for k, v in searched_for.items())
        as_it_comes = "failed" if ERROR in found.trials[0] else f"{found.default_score:.1f}"
        rows.append((name, as_it_comes, f"{found.score:.1f}", share, values))
    click.echo(word_table(rows, ["method", "as it comes", "tuned", "what matters", "values"]))
    effort_words = (
        f"each method had {plural(trials, 'trial')} of {tuned.image_steps} image-steps on its tasks' images"
    )
    seen = f"{early_tasks(tuned.effort['tasks'])}, on {tuned.scored} training images held out"
    click.echo(f"\nA_N in % after {seen}; {effort_words}.\nWritten to {out / TUNED}")
    if plot is not None:
        write_importance(plot, tuned)


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
