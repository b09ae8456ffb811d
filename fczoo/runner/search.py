"""``fczoo tune``: the same number of trials, of the same length, for every method.

No test image is seen. A trial runs the first tasks of a class order and a split of its own; it trains on a
part of their training images and is scored on the rest. Only early tasks are used, since a learner that must
not keep old data cannot tune on tasks that have not come yet (Chaudhry et al., Efficient Lifelong Learning
with A-GEM, ICLR 2019).
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from loky import ProcessPoolExecutor
from tqdm.auto import tqdm

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.method import Method
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.core.streams import HANGUP
from fczoo.federation.environment import command, versions
from fczoo.federation.observer import Silent
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import as_read
from fczoo.runner.dry_run import image_steps
from fczoo.runner.resume import Interrupted, only_process
from fczoo.runner.study import opened, search_method
from fczoo.runner.trials import Effort, tasks_of_trial
from fczoo.runner.tuning import TUNED, Spent, Tuned, TunedMethod, read_tuned

EMPTY: Mapping[str, Mapping[str, Any]] = {}
ORDER = 1_000_000  # added to the seed: class orders and splits of trials are not those of later runs


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
    What ``tuned.json`` in ``out`` has of other methods stays in it.

    Raises FczooError, before anything is tried, for a method that has nothing to tune or cannot start, for
    settings that cannot be tuned on, and where ``out`` belongs to another search or process; after all
    searches, with what was found on disk, where no trial of a method succeeded; and Interrupted after SIGINT.
    """
    built = [_as_it_comes(name, settings, given.get(name, {})) for name in methods]
    if settings.partition.startswith("file:"):
        raise FczooError("--partition file:... is a split of other tasks than those of trials; name a rule")
    own = replace(
        settings,
        class_order="natural",
        class_order_seed=ORDER + effort.seed,
        partition_seed=ORDER + effort.seed,
    )
    effort = replace(effort, tasks=tasks_of_trial(own, effort.tasks))
    with only_process(out):
        try:
            steps, scored, weights = _checked(built, own, effort)
            kept = _kept(out, methods, own, effort, weights)
            search = partial(search_method, settings=own, effort=effort, out=out, given=given)
            ended = _all(search, methods, jobs)
        except KeyboardInterrupt:
            advice = "the trials that had ended are kept, and the same command carries on"
            raise Interrupted(f"stopped as told; {advice} in {out}", signal.SIGINT) from None
        how = {"command": command(), "versions": {**versions(), "optuna": version("optuna")}}
        found = {
            name: msgspec.structs.replace(method, **how)
            for name, method in ended.items()
            if isinstance(method, TunedMethod)
        }
        tuned = Tuned(
            settings=own.portable(),
            effort=msgspec.convert(asdict(effort), Spent),
            image_steps=steps,
            scored=scored,
            weights=weights,
            methods={**kept, **found},
        )
        if tuned.methods:
            tuned.write(out / TUNED)
    if failed := {name: reason for name, reason in ended.items() if name not in found}:
        reasons = [f"no trial of {name} succeeded, the last one: {why}" for name, why in failed.items()]
        raise FczooError("; ".join([*reasons, *([f"the others are in {out / TUNED}"] if found else [])]))
    return tuned


@dataclass(frozen=True)
class Led(Silent):
    """In a worker: ends it after the round in which the command that began it has died, as by a kill."""

    command: int  # its process

    def round(self, record: dict[str, Any]) -> None:
        """What ended is in the search's file; the trial that is broken off is made again."""
        if os.getppid() != self.command:
            os._exit(1)  # loky's worker would wait for more work after an exception


def _as_it_comes(name: str, settings: Settings, given: Mapping[str, Any]) -> Method:
    if not spaces(METHODS.get(name)):
        raise FczooError(f"{name} says of no option where to look for its values; leave it out")
    return create_method(name, settings.dataset, **{**settings.method_options(name), **given})


def _kept(
    out: Path, methods: Sequence[str], settings: Settings, effort: Effort, weights: str
) -> dict[str, TunedMethod]:
    """What the folder's ``tuned.json`` has of methods that are not searched now.

    Raises FczooError where it is of another search, or where they had another number of trials.
    """
    if not (out / TUNED).exists():
        return {}
    earlier = read_tuned(out / TUNED)
    if earlier.weights not in ("", weights):
        raise FczooError(f"{out / TUNED} was found with other weights of the backbone; give another --out")
    tasks = tasks_of_trial(settings, earlier.effort["tasks"])
    before = as_read(earlier.settings), {**earlier.effort, "tasks": tasks, "trials": effort.trials}
    if before != (through_json(settings.portable()), asdict(effort)):
        raise FczooError(f"{out / TUNED} was found with other settings; give another --out")
    kept = {name: found for name, found in earlier.methods.items() if name not in methods}
    if uneven := [name for name, found in kept.items() if len(found.trials) != effort.trials]:
        problem = f"{out / TUNED} has another number of trials than {effort.trials} of {', '.join(uneven)}"
        raise FczooError(f"{problem}; name these in --methods, too, or give another --out")
    return kept


def _checked(built: Sequence[Method], settings: Settings, effort: Effort) -> tuple[int, int, str]:
    """Image-steps of a trial, images that score it, and SHA-256 of the backbone's weights.

    Raises FczooError for a method that cannot start.
    """
    bench = opened(settings, effort)
    for method in built:
        bench.check(method)
    steps = round(sum(image_steps(settings, bench.stream, bench.partition)))
    return steps, len(bench.stream.test.labels), bench.backbone.sha256


def _all(
    search: Callable[..., tuple[str, TunedMethod | str]], methods: Sequence[str], jobs: int
) -> dict[str, TunedMethod | str]:
    """Every method's search, here or in workers, which end with the first error."""
    if jobs == 1:
        return dict(map(partial(search, observer=Silent()), methods))
    opened.cache_clear()  # every worker opens its own
    with ProcessPoolExecutor(jobs, env={"OMP_NUM_THREADS": "1"}, initializer=_prepare) as workers:
        try:
            return dict(workers.map(partial(search, observer=Led(os.getpid())), methods))
        except BaseException:
            workers.shutdown(kill_workers=True)
            raise


def _prepare() -> None:
    """In a new worker, which is killed when its command is told to stop, as a terminal tells both."""
    for number in (signal.SIGINT, *HANGUP):
        signal.signal(number, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # the one that it makes itself would be reported as leaked
