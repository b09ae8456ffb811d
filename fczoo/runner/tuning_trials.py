"""Hyper-parameter search of one method: its space and its trials.

Finished trials are stored in ``NAME.db``; a later command can add more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import qmc

from fczoo.core.errors import FczooError, first_line, options_in_messages
from fczoo.core.files import through_json
from fczoo.core.options import Space, plural, spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.core.seeds import numpy_stream
from fczoo.data.dataset import Images, rows
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.callbacks import Callback
from fczoo.federation.data_setup import partition_stream, whole_stream
from fczoo.federation.environment import code_of, digest
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import current_settings
from fczoo.runner.progress import print_progress
from fczoo.runner.tuned_file import Effort, TunedMethod

RATES = ("head_lr",)  # options that equal ``lr`` if they are none


def extended_space(space: Mapping[str, Space], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space as plain values, extended to contain the method's defaults."""
    values: dict[str, Any] = {}
    for name, domain in space.items():
        default = options[name]
        if isinstance(domain, tuple):
            anchor = default if default is not None else domain[0]
            values[name] = [min(domain[0], anchor), max(domain[1], anchor), domain[2]]
        else:
            values[name] = [*domain, *([] if default in domain else [default])]
    return values


def default_values(space: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method's default values in the space; a rate that is none becomes ``lr``.

    Raises FczooError if another option is none and its space does not contain none: then the
    defaults cannot be a trial.
    """
    defaults = {
        name: options["lr"] if options[name] is None and name in RATES else options[name]
        for name in space
    }
    if missing := [
        name for name, value in defaults.items() if value is None and None not in space[name]
    ]:
        raise FczooError(
            f"{missing[0]} is none by default, which its search space does not contain; set it "
            "with --set, or tune another method"
        )
    return defaults


def sobol_point(space: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """Return a point of the Sobol sequence in the space; point 1 is the middle."""
    point = qmc.Sobol(len(space), scramble=False).fast_forward(number).random()[0]
    values: dict[str, Any] = {}
    for share, (name, domain) in zip(point.tolist(), space.items(), strict=True):
        if not _is_range(domain):
            values[name] = domain[int(share * len(domain))]
        elif domain[-1] == "log":
            values[name] = domain[0] * (domain[1] / domain[0]) ** share
        else:
            values[name] = domain[0] + share * (domain[1] - domain[0])
    return values


def suggest(trial: Any, space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the values that Optuna suggests for a trial."""
    return {name: _suggest_value(trial, name, domain) for name, domain in space.items()}


def _suggest_value(trial: Any, name: str, domain: Sequence[Any]) -> Any:
    if _is_range(domain):
        return trial.suggest_float(name, domain[0], domain[1], log=domain[-1] == "log")
    return trial.suggest_categorical(name, domain)


def _is_range(domain: Sequence[Any]) -> bool:
    """Return whether the domain of an option is a range; otherwise it is a list of values."""
    return len(domain) == 3 and domain[-1] in ("log", "linear") and not isinstance(domain[0], str)


def tasks_of_trial(settings: Settings, requested: int) -> int:
    """Return the number of tasks per trial, at most that of the stream."""
    return min(requested, settings.task_count)


def trial_stream(settings: Settings, effort: Effort) -> tuple[Stream, Partition]:
    """Return the stream and the partition of a trial."""
    return partition_stream(settings, trial_images(settings, effort))


def trial_images(settings: Settings, effort: Effort) -> Stream:
    """Return a stream of the first tasks, with held-out training images as test images."""
    scored_on, limit = effort.score_per_class, settings.train_per_class
    if scored_on is not None and limit is not None:
        settings = replace(settings, train_per_class=limit + scored_on)
    stream = whole_stream(settings)
    tasks = stream.tasks[: effort.tasks]
    stop, labels = tasks[-1].stop, stream.train.labels
    rng, score_parts, task_indices = numpy_stream("tuning", effort.seed), [], []
    for task in tasks:
        task_indices.append(stream.positions(stream.train, task))
        for c in np.unique(labels[task_indices[-1]]):
            class_index = task_indices[-1][labels[task_indices[-1]] == c]
            count = scored_on or max(1, round(effort.held_out * len(class_index)))
            if count >= len(class_index):
                kept = plural(len(class_index), "training image")
                raise FczooError(
                    f"a class has {kept}, but a search would hold out {count}; raise "
                    "--train-per-class, or lower --score-per-class or --held-out"
                )
            score_parts.append(rng.permutation(class_index)[:count])
    score_index = np.sort(np.concatenate(score_parts))
    train_index = np.setdiff1d(np.concatenate(task_indices), score_index)

    def take(index: np.ndarray) -> Images:
        return Images(stream.train.pixels[index], labels[index], rows(stream.train.domains, index))

    return replace(
        stream,
        train=take(train_index),
        test=take(score_index),
        train_index=stream.train_index[train_index],
        groups=rows(stream.groups, train_index),
        class_order=stream.class_order[:stop],
        classes=stream.classes[:stop],
        tasks=tuple(replace(task, classes=stop, count=len(tasks)) for task in tasks),
        split="training images held out",
    )


SOBOL_TRIALS = 4  # trials at points of the Sobol sequence, after the trial of the defaults
SAMPLER_SEEDS = 2**32  # number of seeds that a sampler accepts
ERROR = "error"  # attribute of a failed trial: the reason


@options_in_messages()
def search_method(
    name: str,
    settings: Settings,
    effort: Effort,
    out: Path,
    fixed_options: Mapping[str, Mapping[str, Any]],
    callback: Callback,
) -> tuple[str, TunedMethod | str]:
    """Run all trials of one method; return its best values, or the last trial's error if all fail.

    The first trial has the method's default values. The next ones are a Sobol sequence, which
    covers the space better than few random points and is the same for all methods with this space.
    TPE chooses the other trials. Trials of an earlier command beyond this effort are ignored.
    """
    try:
        import optuna
        from optuna.trial import TrialState
    except ImportError as error:
        raise FczooError("fczoo tune needs Optuna; run pip install 'fczoo[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    fixed_values = fixed_options.get(name, {})
    base_options = {**settings.method_options(name), **fixed_values}
    default_method = create_method(name, settings.dataset, **base_options)
    defaults = asdict(default_method)
    space = {
        **extended_space(spaces(METHODS.get(name)), defaults),
        **{option: [defaults[option]] for option in fixed_values},
    }
    study = _open_study(out / f"{name}.db", name)
    bench = open_trial_benchmark(settings, effort)
    search = {"settings": settings.portable(), "effort": asdict(effort), "space": space}
    hashes = {"weights": bench.backbone.sha256, "code": digest(code_of(settings, default_method))}
    _check_same_search(study, name, settings, {**search, **hashes})
    for interrupted_trial in study.get_trials(states=(TrialState.RUNNING,)):
        # its values are suggested again
        study.tell(interrupted_trial.number, state=TrialState.FAIL)
    final_states = (TrialState.COMPLETE,)
    while (count := len(study.get_trials(states=final_states))) < effort.trials:
        if count <= SOBOL_TRIALS and not study.get_trials(states=(TrialState.WAITING,)):
            study.enqueue_trial(
                sobol_point(space, count) if count else default_values(space, defaults)
            )
        # a new sampler per trial, so that a resumed search suggests the same values
        seed = (1000 * effort.seed + count) % SAMPLER_SEEDS
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        trial = study.ask()
        values, score = suggest(trial, space), 0.0
        try:
            method = create_method(name, settings.dataset, **{**base_options, **values})
            score = bench.run(method, effort.seed, callback).metrics["A_N"]
            end = f"{score:.1f} %"
        except FczooError as error:  # diverged, or values conflict: it counts as a trial
            trial.set_user_attr(ERROR, str(error))
            end = f"failed: {error}"
        study.tell(trial, score)
        print_progress(f"{name}: trial {count + 1} of {effort.trials}, {end}")
    trials = study.get_trials(states=final_states)[: effort.trials]
    successes = [t for t in trials if ERROR not in t.user_attrs]
    if not successes:
        return name, str(trials[-1].user_attrs[ERROR])
    best = max(successes, key=lambda t: t.value)
    return name, TunedMethod(
        values=best.params,
        score=best.value,
        default_score=trials[0].value,
        space=space,
        trials=[{"values": t.params, "score": t.value, **t.user_attrs} for t in trials],
        importance=_importance(trials, len(space) - len(fixed_values)),
        code=digest(
            code_of(
                settings, create_method(name, settings.dataset, **{**base_options, **best.params})
            )
        ),
    )


@lru_cache(1)
def open_trial_benchmark(settings: Settings, effort: Effort) -> Benchmark:
    """Open the benchmark of trials; methods in one process share it."""
    return Benchmark.open(settings, partial(trial_stream, effort=effort))


def _open_study(file: Path, name: str) -> Any:
    """Open or create Optuna's study in a file.

    Raises FczooError if the file cannot be read.
    """
    import optuna
    from sqlalchemy import URL

    try:
        url = URL.create("sqlite", database=str(file)).render_as_string()
        study = optuna.create_study(
            storage=url, study_name=name, load_if_exists=True, direction="maximize"
        )
        study.get_trials()
    except Exception as error:  # Optuna, SQLAlchemy, Alembic and JSON have errors of many types
        problem = f"cannot read the trials in {file}: {first_line(error)}"
        raise FczooError(
            f"{problem}; give another --out, or remove the file to search again"
        ) from error
    return study


def _check_same_search(study: Any, name: str, settings: Settings, now: Mapping[str, Any]) -> None:
    """Raise FczooError if the study has trials of another search; record this one.

    The number of trials may differ.
    """
    plain = through_json(now)
    plain["effort"].pop("trials")
    new_parts = {part: plain[part] for part in ("code", "weights")}  # earlier versions lack them
    earlier_search = {**new_parts, **study.user_attrs.get("search", plain)}
    # earlier versions stored the requested number of tasks
    tasks = tasks_of_trial(settings, earlier_search["effort"]["tasks"])
    earlier_search["settings"] = current_settings(earlier_search["settings"])
    if {**earlier_search, "effort": {**earlier_search["effort"], "tasks": tasks}} != plain:
        difference = next(
            (part for part in new_parts if earlier_search[part] != plain[part]), "settings"
        )
        raise FczooError(
            f"the trials of {name} in this folder used other {difference}; give another --out"
        )
    study.set_user_attr("search", plain)


def _importance(trials: list[Any], options: int) -> dict[str, float]:
    """Compute fANOVA importances; empty with fewer than two options, or if all scores are equal."""
    import optuna

    if options < 2 or len({t.value for t in trials}) < 2:
        return {}
    separate_study = optuna.create_study(direction="maximize")
    separate_study.add_trials(trials)
    shares = optuna.importance.get_param_importances(
        separate_study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {name: float(share) for name, share in shares.items()}
