"""Hyper-parameter search, ``fczoo tune``: equally many trials of equal length for every method.

No test image is used. A trial runs the first tasks of a separate class order and partition; it
trains on a part of their training images and is scored on the rest. Only early tasks are used,
because a continual learner cannot tune on data of future tasks (Chaudhry et al., Efficient Lifelong
Learning with A-GEM, ICLR 2019).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from loky import ProcessPoolExecutor
from tqdm.auto import tqdm

from fczoo.core.errors import FczooError, InterruptedCommandError
from fczoo.core.files import through_json
from fczoo.core.method import Method
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS
from fczoo.core.terminal import HANGUP
from fczoo.federation.callbacks import Callback, CallbackList
from fczoo.federation.environment import command, versions
from fczoo.federation.result import Result
from fczoo.federation.settings import Settings
from fczoo.reports.run_config import configure_run
from fczoo.reports.run_folder import LOG, current_settings
from fczoo.runner.dry_run import image_steps
from fczoo.runner.progress import log_to_file
from fczoo.runner.run_control import lock_folder
from fczoo.runner.tuned_file import TUNED_FILE, Effort, TunedFile, TunedMethod, read_tuned
from fczoo.runner.tuning_trials import open_trial_benchmark, search_method, tasks_of_trial

NO_OPTIONS: Mapping[str, Mapping[str, Any]] = {}
# added to the seed, so that trials have other class orders and splits than runs
SEED_OFFSET = 1_000_000


def tune(
    methods: Sequence[str],
    settings: Settings,
    effort: Effort,
    out: Path,
    jobs: int = 1,
    fixed_options: Mapping[str, Mapping[str, Any]] = NO_OPTIONS,
    callback: Callback | None = None,
) -> TunedFile:
    """Search the hyper-parameters of each method in its own space, ``jobs`` methods at a time.

    Earlier trials in ``out`` are reused. Values of other methods in its ``tuned.json`` stay there.
    Warnings are also logged to its ``log.txt``.

    ``fixed_options`` has options by method that are not searched: they are fixed in every trial.

    Raises FczooError before the first trial if a method has no search space or cannot start, if
    settings do not allow a search, or if ``out`` belongs to another search or process. Raises it
    after all searches, whose values are on disk, if no trial of a method succeeded. Raises
    InterruptedCommandError after SIGINT.
    """
    default_methods = [
        _create_default(name, settings, fixed_options.get(name, {})) for name in methods
    ]
    if settings.partition.startswith("file:"):
        raise FczooError(
            "--partition file:... does not fit the tasks of the trials; give a partitioner such as "
            "dirichlet:0.5"
        )
    trial_settings = replace(
        settings,
        class_order="natural",
        class_order_seed=SEED_OFFSET + effort.seed,
        partition_seed=SEED_OFFSET + effort.seed,
    )
    effort = replace(effort, tasks=tasks_of_trial(trial_settings, effort.tasks))
    with lock_folder(out), log_to_file(out / LOG):
        try:
            steps, score_count, weights = _check_methods(default_methods, trial_settings, effort)
            earlier_results = _results_of_other_methods(
                out, methods, trial_settings, effort, weights
            )
            search = partial(
                search_method,
                settings=trial_settings,
                effort=effort,
                out=out,
                fixed_options=fixed_options,
            )
            with record_interrupts() as check:
                outcomes = _search_all(
                    search, methods, jobs, CallbackList([callback or Callback(), check])
                )
        except KeyboardInterrupt:
            advice = "finished trials are stored, and the same command resumes"
            raise InterruptedCommandError(
                f"stopped on request; {advice} in {out}", signal.SIGINT
            ) from None
        provenance = {"command": command(), "versions": {**versions(), "optuna": version("optuna")}}
        results = {
            name: msgspec.structs.replace(method, **provenance)
            for name, method in outcomes.items()
            if isinstance(method, TunedMethod)
        }
        content = TunedFile(
            settings=trial_settings.portable(),
            effort=effort,
            image_steps=steps,
            scored=score_count,
            weights=weights,
            methods={**earlier_results, **results},
        )
        if content.methods:
            content.write(out / TUNED_FILE)
    if failures := {name: reason for name, reason in outcomes.items() if name not in results}:
        reasons = [
            f"all trials of {name} failed, the last with: {why}" for name, why in failures.items()
        ]
        notes = [f"{out / TUNED_FILE} has values of the other methods"] if results else []
        raise FczooError("; ".join([*reasons, *notes]))
    return content


@dataclass(frozen=True)
class StopCheck(Callback):
    """Callback that calls ``check`` after each round and each task; a method may have no rounds."""

    check: Callable[[], None]

    def round(self, record: dict[str, Any]) -> None:
        self.check()

    def task(self, result: Result) -> None:
        self.check()


def _exit_without(command: int) -> None:
    """End this worker if its command has died; a later command repeats the trial."""
    if os.getppid() != command:
        os._exit(1)  # loky's worker would wait for more work after an exception


def watch_command() -> StopCheck:
    """Return a callback for workers of this process, which ends them after it has died."""
    return StopCheck(partial(_exit_without, os.getpid()))


@contextmanager
def record_interrupts() -> Iterator[StopCheck]:
    """Record SIGINT as well as raising KeyboardInterrupt, which compiled code may swallow.

    Python swallows it in finalisers and callbacks without a caller, and would print a traceback.

    Yields:
        A callback that raises KeyboardInterrupt again after a round or a task.
    """
    has_arrived, report = False, sys.unraisablehook

    def raise_again() -> None:
        if has_arrived:
            raise KeyboardInterrupt

    check = StopCheck(raise_again)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_arrived
        has_arrived = True
        raise KeyboardInterrupt

    def report_errors(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)

    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not has_default_handler or threading.current_thread() is not threading.main_thread():
        yield check  # SIGINT is ignored, or has another handler
        return
    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = report_errors
    try:
        yield check
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _create_default(name: str, settings: Settings, options: Mapping[str, Any]) -> Method:
    if not spaces(METHODS.get(name)):
        raise FczooError(f"{name} has no option with a search space; leave it out")
    return configure_run(name, settings, options).create_method()


def _results_of_other_methods(
    out: Path, methods: Sequence[str], settings: Settings, effort: Effort, weights: str
) -> dict[str, TunedMethod]:
    """Return the values in the folder's ``tuned.json`` of methods that are not searched now.

    Raises FczooError if the file has another search, or another number of trials.
    """
    if not (out / TUNED_FILE).exists():
        return {}
    earlier = read_tuned(out / TUNED_FILE)
    if earlier.weights not in ("", weights):
        raise FczooError(
            f"{out / TUNED_FILE} is from a search with other backbone weights; give another --out"
        )
    tasks = tasks_of_trial(settings, earlier.effort.tasks)
    earlier_search = (
        current_settings(earlier.settings),
        replace(earlier.effort, tasks=tasks, trials=effort.trials),
    )
    if earlier_search != (through_json(settings.portable()), effort):
        raise FczooError(
            f"{out / TUNED_FILE} is from a search with other settings; give another --out"
        )
    other_methods = {
        name: method for name, method in earlier.methods.items() if name not in methods
    }
    if uneven := [
        name for name, method in other_methods.items() if len(method.trials) != effort.trials
    ]:
        problem = f"{out / TUNED_FILE} does not have {effort.trials} trials of {', '.join(uneven)}"
        raise FczooError(
            f"{problem}; add these methods to --methods to search them again, or give another --out"
        )
    return other_methods


def _check_methods(
    methods: Sequence[Method], settings: Settings, effort: Effort
) -> tuple[int, int, str]:
    """Check that all methods can start; return properties of the trials.

    These are the image-steps per trial, the number of images for scoring, and the SHA-256 of the
    backbone's weights. Raises FczooError for a method that cannot start.
    """
    bench = open_trial_benchmark(settings, effort)
    for method in methods:
        bench.check(method)
    steps = round(sum(image_steps(settings, bench.stream, bench.partition)))
    return steps, len(bench.stream.test.labels), bench.backbone.sha256


def _search_all(
    search: Callable[..., tuple[str, TunedMethod | str]],
    methods: Sequence[str],
    jobs: int,
    callback: Callback,
) -> dict[str, TunedMethod | str]:
    """Run the search of every method, here or in workers; the first error stops all."""
    if jobs == 1:
        return dict(map(partial(search, callback=callback), methods))
    with search_workers(jobs) as workers:
        return dict(workers.map(partial(search, callback=watch_command()), methods))


@contextmanager
def search_workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Create a pool of processes for searches; an error kills all of them.

    Args:
        jobs: Number of processes.

    Yields:
        The pool.
    """
    open_trial_benchmark.cache_clear()  # every worker opens its own
    with ProcessPoolExecutor(jobs, env={"OMP_NUM_THREADS": "1"}, initializer=_prepare) as workers:
        try:
            yield workers
        except BaseException:
            workers.shutdown(kill_workers=True)
            raise


def _prepare() -> None:
    """Ignore signals in a new worker, which its command kills if it is interrupted."""
    for number in (signal.SIGINT, *HANGUP):
        signal.signal(number, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock would be reported as leaked
