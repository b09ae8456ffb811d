"""Clients that act elsewhere: what they are asked and answer is bytes, and the numbers are the same."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fczoo import Bench, Method, create_method
from fczoo.core.registry import METHODS
from fczoo.federation.carried import Kept
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.client_side import Asked
from fczoo.federation.engine import Engine
from fczoo.federation.observer import Silent
from fczoo.federation.rounds import Run
from fczoo.federation.spread import Answering

OF_THE_RUN = ("seconds", "phases", "peak_memory")


class Losses(Silent):
    """Keeps what it is told of each client."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def client(self, task: int, round: int, loss: float) -> None:
        self.told.append((task, round, loss))

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        self.told.append((client, losses))


class Workers:
    """Two, of whom nobody remembers anything of a client; groups are answered in the wrong order."""

    def __init__(self, bench: Callable[[], Bench], method: Method):
        self.workers = [Answering(bench(), method, 0) for _ in range(2)]
        self.groups = 0

    def __call__(self, question: bytes, groups: Iterable[bytes], count: int, /) -> Iterator[bytes]:
        answers = {}
        for number, group in reversed(list(enumerate(groups))):
            worker = self.workers[self.groups % 2]
            answers[number] = worker.answer(worker.heard(question), group)
            self.groups += 1
        assert len(answers) == count
        yield from (answers[number] for number in sorted(answers))


def outcome(run: Run) -> dict[str, Any]:
    """All that two runs must have alike, bit for bit."""
    result = {k: v for k, v in asdict(run.run()).items() if k not in OF_THE_RUN}
    return {"result": repr(result), "told": repr(run.observer.told), "state": bits(run.state)}


def bits(tree: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {k: v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in tree.items()}


def both(bench: Callable[[], Bench], method: Method) -> tuple[Run, Run]:
    """A run here and one whose clients are elsewhere."""
    away = Workers(bench, method)
    return tuple(Run(bench(), method, 0, Losses(), None, None, place) for place in (None, away))


@pytest.mark.parametrize("name", METHODS.names())
def test_clients_elsewhere_change_no_bit(make_bench, small_method, name):
    """Rounds, surveys and what clients settle, on random and on fixed views with remembered teachers."""
    augment = "none" if hasattr(METHODS.get(name), "teach") else "crop"
    here, away = both(
        lambda: make_bench(torch.float32, participation=0.7, augment=augment), small_method(name)
    )
    assert outcome(away) == outcome(here)
    assert away.elsewhere.groups


@pytest.mark.parametrize("name", ["lwf", "hgp", "podnet"])
@pytest.mark.parametrize("together", [1, 3])
def test_groups_control_variates_and_hostile_clients_elsewhere(make_bench, small_method, name, together):
    settings = {
        "local": "scaffold",
        "attack": "label-flip",
        "attackers": 0.34,
        "together": together,
        "epochs": 1,
    }
    here, away = both(lambda: make_bench(torch.float32, augment="none", **settings), small_method(name))
    assert outcome(away) == outcome(here)
    assert bits(away.controls.server) == bits(here.controls.server)
    assert {k: bits(v) for k, v in away.memories.items()} == {k: bits(v) for k, v in here.memories.items()}


def test_a_run_goes_on_elsewhere_that_was_begun_here(make_bench, small_method, tmp_path):
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    def bench() -> Bench:
        return make_bench(torch.float32, augment="none", local="scaffold")

    method, path = small_method("glfc", tune="head"), tmp_path / "checkpoint"
    here, _ = both(bench, method)
    with pytest.raises(Killed):
        Run(bench(), method, 0, Losses(), Checkpoint(path, kill), None).run()
    rest = Run(bench(), method, 0, Losses(), Checkpoint(path), None, Workers(bench, method))
    assert outcome(rest)["state"] == outcome(here)["state"]


@pytest.mark.parametrize("name", ["lwf", "icarl"])
def test_what_clients_keep_is_given_and_returned(make_bench, small_method, watch, name):
    """The same question twice has the same answer, the run's; what is given stays as it is."""
    record = watch(make_bench(augment="none"), small_method(name))
    call = record.rounds[-1]
    engine: Engine = call.engine
    kept = Kept(call.memories, {}, {}).of([call.clients[0].number])
    before = {k: bits(v) for k, v in kept.memories.items()}
    asked = Asked(None, call.state, {}, call.ctx)
    first, again = (engine.side.answer(asked, call.clients[:1], kept) for _ in range(2))
    assert bits(dict(first.payloads[0])) == bits(dict(again.payloads[0]))
    for name, value in call.payloads[0].items():  # the teacher's outputs were kept then
        torch.testing.assert_close(first.payloads[0][name], value, rtol=1e-6, atol=1e-9)
    assert {k: bits(v) for k, v in kept.memories.items()} == before and not kept.taught


def test_bytes_that_are_no_question_are_refused(make_bench):
    answering = Answering(make_bench(), create_method("fedncm"), 0)
    with pytest.raises(ValueError, match="header"):
        answering.heard(b"nothing")
