"""The search of one method: its trials are kept in ``NAME.db`` as they end, and more may follow later."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import through_json
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.federation.benchmark import Bench
from fczoo.federation.code import code_of, digest
from fczoo.federation.observer import Observer
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import as_read
from fczoo.runner.progress import say
from fczoo.runner.search_space import around, own_values, spread, suggest
from fczoo.runner.trials import Effort, tasks_of_trial, trial_stream
from fczoo.runner.tuning import TunedMethod

SPREAD = 4  # trials that are spread over the space, after the first
SEEDS = 2**32  # that a sampler takes
ERROR = "error"  # of a failed trial: why


def search_method(
    name: str,
    settings: Settings,
    effort: Effort,
    out: Path,
    given: Mapping[str, Mapping[str, Any]],
    observer: Observer,
) -> tuple[str, TunedMethod | str]:
    """All trials of one method; what was found, or why the last trial failed where none succeeded.

    The first has the method's own values; the next are spread over the space, from its middle on, the same
    for all methods with that space, since so few drawn at random leave most of it unseen; then TPE chooses.
    Of what an earlier command tried beyond this effort nothing counts.
    """
    try:
        import optuna
        from optuna.trial import TrialState
    except ImportError as error:
        raise FczooError("fczoo tune needs Optuna; run pip install 'fczoo[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    fixed = given.get(name, {})
    usual = {**settings.method_options(name), **fixed}
    made = create_method(name, settings.dataset, **usual)
    own = asdict(made)
    space = {**around(spaces(METHODS.get(name)), own), **{option: [own[option]] for option in fixed}}
    study = _study(out / f"{name}.db", name)
    bench = opened(settings, effort)
    now = {"settings": settings.portable(), "effort": asdict(effort), "space": space}
    here = {"weights": bench.backbone.sha256, "code": digest(code_of(settings, made))}
    _same_search(study, name, settings, {**now, **here})
    for broken in study.get_trials(states=(TrialState.RUNNING,)):  # an earlier command ended in it
        study.tell(broken.number, state=TrialState.FAIL)  # and its values are asked for again
    ended = (TrialState.COMPLETE,)
    while (done := len(study.get_trials(states=ended))) < effort.trials:
        if done <= SPREAD and not study.get_trials(states=(TrialState.WAITING,)):
            study.enqueue_trial(spread(space, done) if done else own_values(space, own))
        # a sampler of its own for each trial: a search that is carried on asks what an unbroken one asks
        seed = (1000 * effort.seed + done) % SEEDS
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        trial = study.ask()
        values, score = suggest(trial, space), 0.0
        try:
            method = create_method(name, settings.dataset, **{**usual, **values})
            score = bench.run(method, effort.seed, observer).metrics["A_N"]
            end = f"{score:.1f} %"
        except FczooError as error:  # it diverged, or its values do not go together: that counts as a trial
            trial.set_user_attr(ERROR, str(error))
            end = f"failed: {error}"
        study.tell(trial, score)
        say(f"{name}: trial {done + 1} of {effort.trials}, {end}")
    tried = study.get_trials(states=ended)[: effort.trials]
    succeeded = [t for t in tried if ERROR not in t.user_attrs]
    if not succeeded:
        return name, str(tried[-1].user_attrs[ERROR])
    best = max(succeeded, key=lambda t: t.value)
    return name, TunedMethod(
        values=best.params,
        score=best.value,
        default_score=tried[0].value,
        space=space,
        trials=[{"values": t.params, "score": t.value, **t.user_attrs} for t in tried],
        importance=_importance(tried, len(space) - len(fixed)),
        code=digest(code_of(settings, create_method(name, settings.dataset, **{**usual, **best.params}))),
    )


@lru_cache(1)
def opened(settings: Settings, effort: Effort) -> Bench:
    """What trials run on, loaded once a process for all methods."""
    return Bench.open(settings, partial(trial_stream, effort=effort))


def _study(file: Path, name: str) -> Any:
    """Optuna's study in a file, which is made if need be. Raises FczooError where it cannot be read."""
    import optuna
    from sqlalchemy import URL

    try:
        place = URL.create("sqlite", database=str(file)).render_as_string()
        study = optuna.create_study(storage=place, study_name=name, load_if_exists=True, direction="maximize")
        study.get_trials()
    except Exception as error:  # Optuna, SQLAlchemy, Alembic and the reading of JSON each have their own
        problem = f"{file} holds no trials that can be read: {first_line(error)}"
        raise FczooError(f"{problem}; give another --out, or remove the file to search anew") from error
    return study


def _same_search(study: Any, name: str, settings: Settings, now: Mapping[str, Any]) -> None:
    """Raise FczooError where the folder holds trials made in another way. More trials may follow."""
    plain = through_json(now)
    plain["effort"].pop("trials")
    lacked = {part: plain[part] for part in ("code", "weights")}  # by earlier versions
    before = {**lacked, **study.user_attrs.get("search", plain)}
    tasks = tasks_of_trial(settings, before["effort"]["tasks"])  # earlier versions wrote what was asked for
    before["settings"] = as_read(before["settings"])
    if {**before, "effort": {**before["effort"], "tasks": tasks}} != plain:
        other = next((part for part in lacked if before[part] != plain[part]), "settings")
        raise FczooError(
            f"the trials of {name} in this folder were made with other {other}; give another --out"
        )
    study.set_user_attr("search", plain)


def _importance(tried: list[Any], options: int) -> dict[str, float]:
    """fANOVA needs two options and scores that differ; otherwise there is nothing to say."""
    import optuna

    if options < 2 or len({t.value for t in tried}) < 2:
        return {}
    alone = optuna.create_study(direction="maximize")
    alone.add_trials(tried)
    shares = optuna.importance.get_param_importances(
        alone, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {name: float(share) for name, share in shares.items()}
