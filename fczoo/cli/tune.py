"""Command ``fczoo tune``."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

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
from fczoo.cli.values import Number, WholeNumber
from fczoo.core.registry import DATASETS, METHODS
from fczoo.federation.settings import Settings

FIRST_TASKS = 3  # tasks of a trial
HELD_OUT_FRACTION = 0.2  # fraction of the training images on which a trial is scored
# settings that --seed determines
SETTINGS_OF_SEED = ("class_order", "class_order_seed", "partition_seed", "vary")
EXCLUDED_SETTINGS = (*SETTINGS_OF_SEED, "start_from", "stop_after_tasks")


@click.command(cls=GroupedCommand, common_options=COMMON_OPTIONS)
@grouped_option(
    RUNS,
    "--methods",
    metavar="NAMES",
    required=True,
    shell_complete=complete(METHODS, ("all",)),
    help="Names of methods, separated by commas, or all; see `fczoo list methods`",
)
@grouped_option(
    RUNS,
    "--set",
    "changes",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="Fix an option of a method in all trials instead of searching it; repeat it for more",
)
@grouped_option(
    RUNS,
    "--trials",
    type=WholeNumber(1, 10_000),
    default=16,
    help="Number of trials per method  [default: 16]",
)
@grouped_option(
    RUNS,
    "--first-tasks",
    type=WholeNumber(1),
    help="Number of first tasks that each trial runs  [default: 3, or all if fewer]",
)
@grouped_option(
    RUNS,
    "--held-out",
    type=Number(0.01, 0.9),
    help="Fraction of the training images that is held out to score trials  [default: 0.2]",
)
@grouped_option(
    RUNS,
    "--score-per-class",
    type=WholeNumber(1),
    help="Hold out this number of training images per class, instead of the fraction --held-out",
)
@grouped_option(
    RUNS,
    "--seed",
    type=WholeNumber(0),
    default=0,
    help="Seed of class order, partition and training  [default: 0]",
)
@settings_options([field.name for field in fields(Settings) if field.name not in EXCLUDED_SETTINGS])
@grouped_option(
    OUTPUT,
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the trials and of tuned.json; the same command resumes there",
)
@grouped_option(
    OUTPUT,
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a figure of each option's importance, such as FILE.png",
)
@grouped_option(
    OUTPUT,
    "--jobs",
    metavar="auto|NUMBER",
    default="1",
    help="Number of methods at the same time; auto: one per GPU, or per core without a GPU  "
    "[default: 1]",
)
@message_options()
@download_options()
def tune(
    methods: str,
    changes: Sequence[str],
    trials: int,
    first_tasks: int | None,
    held_out: float | None,
    score_per_class: int | None,
    seed: int,
    out: Path,
    plot: Path | None,
    jobs: str,
    download: bool | None,
    **parameters: Any,
) -> None:
    """Search hyper-parameters with the same effort per method, without test images.

    `fczoo bench --tuned FILE` uses the result, the file tuned.json in --out.
    """
    from fczoo.cli.arguments import ALL, parse_changes, parse_jobs, parse_methods, parse_specs
    from fczoo.cli.config import default_protocol
    from fczoo.cli.downloads import find_missing, provide
    from fczoo.cli.other_tools import check_partitions
    from fczoo.core.errors import FczooError
    from fczoo.core.options import plural, spaces
    from fczoo.federation.device import resolve_precision
    from fczoo.reports.drawing import check_plot, write_importance
    from fczoo.reports.run_config import configure_run
    from fczoo.reports.text_format import early_tasks, option_word, word_table
    from fczoo.runner.tune import tune as search
    from fczoo.runner.tuned_file import TUNED_FILE, Effort
    from fczoo.runner.tuning_trials import ERROR

    if plot is not None:
        check_plot(plot)
    _check_search(held_out, score_per_class, seed, out)
    dataset = DATASETS.canonical_name(parameters.pop("dataset") or "digits")
    setting_values = {name: value for name, value in parameters.items() if value is not None}
    check_partitions(parse_specs(setting_values.get("partition"), "--partition"))
    settings = Settings.for_dataset(
        dataset, **setting_values, **default_protocol(dataset, setting_values)
    )
    settings = resolve_precision(settings)
    settings.check()
    method_names, fixed_options = parse_methods(methods), parse_changes(changes)
    if not method_names:
        raise FczooError("no methods are named; give --methods a name, or all")
    searched_methods = [
        name for name in method_names if methods != ALL or spaces(METHODS.get(name))
    ]
    if unknown_methods := sorted(fixed_options.keys() - searched_methods):
        raise FczooError(
            f"--set has options of methods that are not searched: {', '.join(unknown_methods)}; "
            "add these methods to --methods, or leave the options out"
        )
    if first_tasks is not None and first_tasks > settings.task_count:
        raise FczooError(
            f"--first-tasks is {first_tasks}, but {dataset} is divided into "
            f"{plural(settings.task_count, 'task')}; lower --first-tasks, or raise --tasks"
        )
    if missing := find_missing([settings]):
        for name in searched_methods:  # report wrong options before any question
            configure_run(name, settings, fixed_options.get(name, {}))
        provide(missing, download)
    effort = Effort(
        trials=trials,
        tasks=first_tasks or FIRST_TASKS,
        held_out=HELD_OUT_FRACTION if held_out is None else held_out,
        score_per_class=score_per_class,
        seed=seed,
    )
    search_result = search(searched_methods, settings, effort, out, parse_jobs(jobs), fixed_options)
    rows = []
    for name, method_result in search_result.methods.items():
        values = ", ".join(
            f"{k}={option_word(_round_value(v))}" for k, v in method_result.values.items()
        )
        importance = {
            k: v
            for k, v in method_result.importance.items()
            if k not in fixed_options.get(name, {})
        }
        share = ", ".join(f"{k} {100 * v:.0f} %" for k, v in importance.items())
        default_score = (
            "failed" if ERROR in method_result.trials[0] else f"{method_result.default_score:.1f}"
        )
        rows.append((name, default_score, f"{method_result.score:.1f}", share, values))
    click.echo(
        word_table(rows, ["method", "with default options", "tuned", "importance", "values"])
    )
    effort_words = (
        f"each method had {plural(trials, 'trial')} of {search_result.image_steps} image-steps"
    )
    evaluation = (
        f"{early_tasks(search_result.effort.tasks)}, on {search_result.scored} held-out training "
        "images"
    )
    click.echo(f"\nA_N in % after {evaluation}; {effort_words}.\nWritten to {out / TUNED_FILE}")
    if plot is not None:
        shares = {name: method.importance for name, method in search_result.methods.items()}
        write_importance(plot, shares)


def _check_search(
    held_out: float | None, score_per_class: int | None, seed: int, out: Path
) -> None:
    """Raise FczooError for options that exclude each other, a large seed, or a folder in use."""
    from fczoo.core.errors import FczooError
    from fczoo.core.options import MAX_INTEGER
    from fczoo.reports.run_folder import BENCH
    from fczoo.runner.tune import SEED_OFFSET

    if held_out is not None and score_per_class is not None:
        raise FczooError("--held-out and --score-per-class are both given; leave one out")
    if seed > MAX_INTEGER - SEED_OFFSET:
        raise FczooError(f"--seed is {seed}; it must be at most {MAX_INTEGER - SEED_OFFSET}")
    if out.is_file():
        raise FczooError(f"--out {out} is a file; give a folder")
    if (out / BENCH).is_file():
        raise FczooError(f"--out {out} is a run folder of `fczoo bench`; give another folder")


def _round_value(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
