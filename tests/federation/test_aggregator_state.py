"""Aggregators that keep state are rejected: a resumed run would end with other numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from click.testing import CliRunner

from fczoo.aggregators.averaging import uniform
from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from fczoo.core.registry import AGGREGATORS
from fczoo.testing import check_aggregator
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_cli import TINY

REFUSAL = (
    "aggregator stateful keeps state or draws random numbers, so a resumed run would differ; "
    "compute its result from the uploads only"
)


@pytest.fixture(autouse=True)
def unregister_stateful() -> Iterator[None]:
    yield
    AGGREGATORS._entries.pop("stateful", None)


@dataclass
class Momentum:
    """Server momentum: the first merge looks like a mean, the second one does not."""

    beta: float = 0.9
    before: dict = field(default_factory=dict)
    velocity: dict = field(default_factory=dict)

    def __call__(self, payloads):
        mean = uniform(payloads)
        for name, value in mean.items():
            step = value - self.before.get(name, value)
            self.velocity[name] = (
                self.beta * self.velocity.get(name, torch.zeros_like(value)) + step
            )
            mean[name] = self.before.get(name, value) + self.velocity[name]
        self.before = dict(mean)
        return mean


def changes_after_five_merges() -> Callable:
    """Return a mean for five merges, then the first upload."""
    calls = [0]

    def merge(payloads):
        calls[0] += 1
        return (
            uniform(payloads) if calls[0] <= 5 else {k: v.clone() for k, v in payloads[0].items()}
        )

    return merge


def random_mixture(payloads):
    part = torch.rand(())
    return {k: part * v + (1 - part) * payloads[0][k] for k, v in payloads[-1].items()}


def needs_seven_uploads(merge: Callable) -> Callable:
    """Merge as ``merge`` does, but raise for fewer than seven uploads."""

    def merge_checked(payloads):
        if len(payloads) < 7:
            raise FczooError("stateful needs 7 uploads")
        return merge(payloads)

    return merge_checked


STATEFUL = [
    lambda: Momentum,
    changes_after_five_merges,
    lambda: random_mixture,
    lambda: needs_seven_uploads(changes_after_five_merges()),
]


@pytest.mark.parametrize("make", STATEFUL)
def test_run_rejects_stateful_aggregator(make: Callable) -> None:
    bench, method = toy_bench(aggregator="stateful"), small_method("fedavg")
    for start in (bench.check, bench.run, bench.start):
        AGGREGATORS._entries.pop("stateful", None)
        AGGREGATORS.register("stateful")(make())
        with pytest.raises(FczooError) as caught:
            start(method)
        assert str(caught.value) == REFUSAL


def test_aggregator_of_method_is_checked(monkeypatch) -> None:
    AGGREGATORS.register("stateful")(Momentum)
    method = small_method("fedavg")
    training = method.training()
    object.__setattr__(training, "averaging", "stateful")
    monkeypatch.setattr(type(method), "training", lambda self: training)
    with pytest.raises(FczooError, match="aggregator stateful keeps state"):
        toy_bench().check(method)


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_bench_rejects_stateful_aggregator_before_writing(extra: list[str], tmp_path) -> None:
    AGGREGATORS.register("stateful")(Momentum)
    run = ["bench", "--methods", "fedavg", "--aggregator", "stateful", *TINY, *extra]
    result = CliRunner().invoke(main, [*run, "--out", str(tmp_path / "run")])
    assert (result.exit_code, result.stderr.strip()) == (1, f"Error: {REFUSAL}")
    assert not list(tmp_path.glob("run/*.json"))


def test_check_aggregator_rejects_state() -> None:
    merge = Momentum()
    merge.name = "stateful"
    says = "stateful merges the same uploads to different values; draw nothing and keep no state"
    with pytest.raises(AssertionError, match=says):
        check_aggregator(merge)


def test_stateless_aggregators_are_accepted() -> None:
    for name in AGGREGATORS.names("fczoo.aggregators"):
        toy_bench(aggregator=name).check(small_method("fedavg"))
    AGGREGATORS.register("stateful")(
        lambda payloads: {"usage": payloads[0]["usage"]}
    )  # of one method
    toy_bench(aggregator="stateful").check(small_method("fedavg"))
