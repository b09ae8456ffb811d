"""A run of every method has the same numbers however it is executed, bit for bit.

Runs that are resumed, deterministic, distributed to workers or measured more often are compared
with one reference run of the method. Equal seeds and batched clients are part of
``test_conformance.py``.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fczoo import Benchmark, Method
from fczoo.core.registry import METHODS
from fczoo.federation.callbacks import CallbackList
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.result import Result
from fczoo.federation.run import FederatedRun
from fczoo.runner.execute import RoundWriter
from fczoo.testing.toy_benchmark import TASKS, toy_bench
from helpers_methods import quick_method
from helpers_remote import Losses, Workers, outcome, outcome_so_far
from helpers_resume import Crash, crash_after, rounds, run_and_record, timeless


@dataclass
class Reference:
    """A run of a method in one process, from the first task to the last."""

    method: Method
    settings: dict[str, Any]
    result: Result
    rounds: list[Any]
    after_two_tasks: dict[str, Any]

    def bench(self, **settings: Any) -> Benchmark:
        """Return a new benchmark with the settings of the run, and others."""
        return toy_bench(torch.float32, **self.settings, **settings)

    def differences(self, result: Result) -> set[str]:
        """Name the fields of a result that differ from the reference, apart from times."""
        theirs = timeless(asdict(self.result))
        return {name for name, value in timeless(asdict(result)).items() if value != theirs[name]}


@pytest.fixture(scope="module", params=METHODS.names())
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """Run a method on random views, or on fixed ones if it caches a teacher's outputs.

    Pytest runs the tests of this module method by method.
    """
    method, folder = quick_method(request.param), tmp_path_factory.mktemp("reference")
    augment = "none" if hasattr(method, "teacher_outputs") else "crop"
    settings = {"participation": 0.7, "augment": augment, "epochs": 1, "batch_size": 8}
    losses, after_tasks = Losses(), []
    with RoundWriter(folder) as recorder:
        callback = CallbackList([losses, recorder])
        run = toy_bench(torch.float32, **settings).start(method, 0, callback)
        for _ in run:
            after_tasks.append(outcome_so_far(run, losses))
    yield Reference(method, settings, run.result, rounds(folder), after_tasks[1])


def test_resumed_deterministic_run_matches(reference: Reference, tmp_path: Path) -> None:
    """Crash twice, each time at the first checkpoint, and resume."""
    bench, path = reference.bench(deterministic=True), tmp_path / "checkpoint.safetensors"
    for _ in range(2):
        with pytest.raises(Crash):
            run_and_record(bench, reference.method, tmp_path, Checkpoint(path, crash_after(1)))
    result = run_and_record(bench, reference.method, tmp_path, Checkpoint(path))
    assert not torch.are_deterministic_algorithms_enabled()
    assert reference.differences(result) <= {"settings"}
    assert rounds(tmp_path) == reference.rounds


def test_remote_clients_match_bit_for_bit(reference: Reference) -> None:
    """Run clients on workers in rounds and at the boundaries of two tasks."""
    workers = Workers(reference.bench, reference.method)
    run = FederatedRun(reference.bench(), reference.method, 0, Losses(), None, None, workers)
    assert outcome(run, 2) == reference.after_two_tasks
    assert workers.groups


def test_measurements_change_no_other_result(reference: Reference) -> None:
    """Measure after every round, and personal models.

    Every curve has the ends of tasks. A method that trains has personal models.
    """
    plain = reference.result
    measured = reference.bench(eval_every=1, personal_epochs=1).run(reference.method)
    measurements = {"curve", "metrics", "personal_accuracy", "settings"}
    assert reference.differences(measured) <= measurements
    others = {k: v for k, v in measured.metrics.items() if not k.startswith("personal")}
    assert others == plain.metrics
    ends = [[t, rounds] for t, rounds, _, _ in plain.curve]
    assert [t for t, _ in ends] == [0, 1, 2]
    assert [*{point[0]: point for point in measured.curve}.values()] == plain.curve
    assert len(measured.curve) == 3 + sum(rounds for _, rounds in ends)
    assert all(0 <= accuracy <= 100 for _, _, accuracy, _ in measured.curve)
    training = reference.method.training()
    trains = training.active_optims(TASKS[2], 1) and training.data_scope != "pooled"
    assert len(measured.personal_accuracy) == (3 if trains else 0)
    assert all(0 <= accuracy <= 100 for accuracy in measured.personal_accuracy)
    assert ("personal_mean" in measured.metrics) == bool(trains)
