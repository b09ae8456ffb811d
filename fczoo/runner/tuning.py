"""``fczoo tune``: the same number of trials, of the same length, for every method.

No test image is seen. A trial runs the first tasks of a class order and a split of its own; it trains on a
part of their training images and is scored on the rest. Only early tasks are used, since a learner that must
not keep old data cannot tune on tasks that have not come yet (Chaudhry et al., Efficient Lifelong Learning
with A-GEM, ICLR 2019).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from loky import ProcessPoolExecutor
from scipy.stats import qmc

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, Number, read_record, write_record
from fczoo.core.options import Space, spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.federation.benchmark import Bench
from fczoo.federation.code import code_of, digest
from fczoo.federation.observer import Observer, Silent
from fczoo.federation.settings import Settings
from fczoo.runner.progress import say
from fczoo.runner.resume import only_process
from fczoo.runner.trials import Effort, trial_stream

FORMAT = "fczoo-tuned-1"
TUNED = "tuned.json"
EMPTY: Mapping[str, Mapping[str, Any]] = {}
ORDER = 1_000_000  # added to the seed: class orders and splits of trials are not those of later runs
SPREAD = 4  # trials that are spread over the space, after the first
RATES = ("head_lr",)  # options that are as ``lr`` where they are none
WITHOUT_WEIGHT = {  # settings of which the best values of a method do not depend
    *("data_root", "test_per_class", "class_order", "class_order_seed", "partition_seed", "vary"),
    *("device", "deterministic", "together", "cache_queries"),
}


class TunedMethod(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one method."""

    values: dict[str, Any]  # of the best trial
    score: Number  # its A_N on the images held out, %
    default_score: Number  # that of the method as it comes, the first trial
    space: dict[str, Any]
    trials: list[dict[str, Any]]  # values and score of each; 0 and the reason where a run failed
    importance: dict[str, Number]  # share of the score's variance that an option explains (fANOVA)
    code: str  # SHA-256 of the modules that took part, as in the versions of a run


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """``tuned.json``."""

    settings: dict[str, Any]
    effort: dict[str, Any]
    image_steps: Count  # images that all clients pass forward and backward in a trial; a mean where drawn
    scored: Count  # training images on which a trial is scored
    methods: dict[str, TunedMethod]

    def other_settings(self, settings: Settings) -> dict[str, Any]:
        """Settings, as they were in the search, that are others in a run and may call for other values."""
        here = msgspec.to_builtins(settings.portable())
        return {k: v for k, v in self.settings.items() if k not in WITHOUT_WEIGHT and here.get(k) != v}


def tune(
    methods: Sequence[str],
    settings: Settings,
    effort: Effort,
    out: Path,
    jobs: int = 1,
    given: Mapping[str, Mapping[str, Any]] = EMPTY,
) -> Tuned:
    """Search each method's own space; ``jobs`` methods at a time. What was tried before in ``out`` is kept.

    ``given`` has, by method, options that are not searched: every trial has them, and so has what is found.

    Raises FczooError for a method that has nothing to tune, for settings that cannot be tuned on, and where
    another process holds ``out``.
    """
    for name in methods:
        if not spaces(METHODS.get(name)):
            raise FczooError(f"{name} says of no option where to look for its values; leave it out")
        create_method(name, settings.dataset, **{**settings.method_options(name), **given.get(name, {})})
    if settings.partition.startswith("file:"):
        raise FczooError("--partition file:... is a split of other tasks than those of trials; name a rule")
    own = replace(
        settings,
        class_order="natural",
        class_order_seed=ORDER + effort.seed,
        partition_seed=ORDER + effort.seed,
    )
    stream = _opened(own, effort).stream
    steps = len(stream.train.labels) * own.rounds * own.epochs * own.drawn(own.clients) / own.clients
    search = partial(_search, settings=own, effort=effort, out=out, given=given)
    with only_process(out):
        if jobs == 1:
            found = dict(map(partial(search, observer=Silent()), methods))
        else:
            _opened.cache_clear()  # every worker opens its own
            with ProcessPoolExecutor(jobs, env={"OMP_NUM_THREADS": "1"}) as workers:
                found = dict(workers.map(partial(search, observer=Led(os.getpid())), methods))
        tuned = Tuned(
            settings=own.portable(),
            effort=asdict(effort),
            image_steps=round(steps),
            scored=len(stream.test.labels),
            methods=found,
        )
        write_record(out / TUNED, FORMAT, msgspec.to_builtins(tuned))
    return tuned


def read_tuned(path: Path) -> Tuned:
    """The file that ``tune`` wrote. Raises FczooError when it is missing, changed or of another form."""
    return read_record(path, "file of fczoo tune", Tuned, FORMAT)


@dataclass(frozen=True)
class Led(Silent):
    """In a worker: ends it after the round in which the command that began it has died, as by a kill."""

    command: int  # its process

    def round(self, record: dict[str, Any]) -> None:
        """What ended is in the search's file; the trial that is broken off is made again."""
        if os.getppid() != self.command:
            os._exit(1)  # loky's worker would wait for more work after an exception


def _search(
    name: str,
    settings: Settings,
    effort: Effort,
    out: Path,
    given: Mapping[str, Mapping[str, Any]],
    observer: Observer,
) -> tuple[str, TunedMethod]:
    """All trials of one method, kept in ``NAME.db`` as they end.

    The first has the method's own values; the next are spread over the space, from its middle on, the same
    for all methods with that space, since so few drawn at random leave most of it unseen; then TPE chooses.
    """
    try:
        import optuna
        from optuna.trial import TrialState
    except ImportError as error:
        raise FczooError("fczoo tune needs Optuna; run pip install 'fczoo[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    fixed = given.get(name, {})
    usual = {**settings.method_options(name), **fixed}
    own = asdict(create_method(name, settings.dataset, **usual))
    space = {**_around(spaces(METHODS.get(name)), own), **{option: [own[option]] for option in fixed}}
    study = optuna.create_study(
        storage=f"sqlite:///{out / f'{name}.db'}", study_name=name, load_if_exists=True, direction="maximize"
    )
    _same_search(study, name, {"settings": settings.portable(), "effort": asdict(effort), "space": space})
    for broken in study.get_trials(states=(TrialState.RUNNING,)):  # an earlier command ended in it
        study.tell(broken.number, state=TrialState.FAIL)  # and its values are asked for again
    ended = (TrialState.COMPLETE,)
    bench = _opened(settings, effort)
    while (done := len(study.get_trials(states=ended))) < effort.trials:
        if done <= SPREAD and not study.get_trials(states=(TrialState.WAITING,)):
            study.enqueue_trial(_spread(space, done) if done else _own_values(space, own))
        # a sampler of its own for each trial: a search that is carried on asks what an unbroken one asks
        study.sampler = optuna.samplers.TPESampler(seed=1000 * effort.seed + done, n_startup_trials=0)
        trial = study.ask()
        values = {option: _suggest(trial, option, where) for option, where in space.items()}
        score = 0.0
        try:
            method = create_method(name, settings.dataset, **{**usual, **values})
            score = bench.run(method, effort.seed, observer).metrics["A_N"]
        except FczooError as error:  # it diverged, or its values do not go together: that counts as a trial
            trial.set_user_attr("error", str(error))
        study.tell(trial, score)
        say(f"{name}: trial {done + 1} of {effort.trials}, {score:.1f} %")
    tried = study.get_trials(states=ended)
    method = create_method(name, settings.dataset, **{**usual, **study.best_params})
    return name, TunedMethod(
        values=study.best_params,
        score=study.best_value,
        default_score=tried[0].value or 0.0,
        space=space,
        trials=[{"values": t.params, "score": t.value, **t.user_attrs} for t in tried],
        importance=_importance(study, len(space) - len(fixed)),
        code=digest(code_of(settings, method)),
    )


def _around(space: Mapping[str, Space], options: Mapping[str, Any]) -> dict[str, Any]:
    """The space, as plain values, widened where the method's own value lies outside."""
    found: dict[str, Any] = {}
    for name, where in space.items():
        own = options[name]
        if isinstance(where, tuple):
            known = own if own is not None else where[0]
            found[name] = [min(where[0], known), max(where[1], known), where[2]]
        else:
            found[name] = [*where, *([] if own in where else [own])]
    return found


def _own_values(space: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own values; a rate that is none is that of the prompts, so ``lr``.

    Raises FczooError for another option that is none: the method as it comes could not be a trial.
    """
    own = {
        name: options["lr"] if options[name] is None and name in RATES else options[name] for name in space
    }
    if bare := [name for name, value in own.items() if value is None and None not in space[name]]:
        raise FczooError(
            f"{bare[0]} is none by default, no point of its space; tune another option, or --set it"
        )
    return own


def _spread(space: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """A point of the space: that of Sobol's sequence with this number; the first is the middle."""
    point = qmc.Sobol(len(space), scramble=False).fast_forward(number).random()[0]
    values: dict[str, Any] = {}
    for share, (name, where) in zip(point.tolist(), space.items(), strict=True):
        if not _range(where):
            values[name] = where[int(share * len(where))]
        elif where[-1] == "log":
            values[name] = where[0] * (where[1] / where[0]) ** share
        else:
            values[name] = where[0] + share * (where[1] - where[0])
    return values


def _range(where: Sequence[Any]) -> bool:
    """Whether a part of a space goes from a lowest to a highest value; else it lists its values."""
    return len(where) == 3 and where[-1] in ("log", "linear") and not isinstance(where[0], str)


def _suggest(trial: Any, name: str, where: Sequence[Any]) -> Any:
    if _range(where):
        return trial.suggest_float(name, where[0], where[1], log=where[-1] == "log")
    return trial.suggest_categorical(name, where)


def _same_search(study: Any, name: str, now: dict[str, Any]) -> None:
    """Raise FczooError where the folder holds trials made in another way. More trials may follow."""
    plain = msgspec.json.decode(msgspec.json.encode(now))
    plain["effort"].pop("trials")
    before = study.user_attrs.get("search")
    if before is not None and before != plain:
        raise FczooError(
            f"the trials of {name} in this folder were made with other settings; give another --out"
        )
    study.set_user_attr("search", plain)


def _importance(study: Any, options: int) -> dict[str, float]:
    """fANOVA needs two options and scores that differ; otherwise there is nothing to say."""
    import optuna

    if options < 2 or len({t.value for t in study.trials if t.value is not None}) < 2:
        return {}
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )
    return {name: float(share) for name, share in shares.items()}


@lru_cache(1)
def _opened(settings: Settings, effort: Effort) -> Bench:
    """Loaded once a process for all methods."""
    return Bench.open(settings, partial(trial_stream, effort=effort))
