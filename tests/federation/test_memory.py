"""What clients remember: written before and after training, kept by those that do not train, saved."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fczoo.core.tree import select
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.observer import Silent
from fczoo.federation.rounds import Run
from helpers_engine import Toy


@dataclass(frozen=True)
class Counting(Toy):
    """Remembers how often it was prepared and how often it finished; ``failing`` clients diverge."""

    name = "counting"
    failing: int = -1

    def training(self):
        training = super().training()
        training.uploads["rounds"] = training.uploads["seen"]
        return training

    def begin_task(self, state, task, backbone, rng):
        return {"w": torch.zeros(backbone.dim, dtype=torch.float64)}

    def prepare(self, backbone, data, ctx):
        zero = torch.zeros((), dtype=torch.float64)
        memory = {"begun": zero, "done": zero, **ctx.memory}
        return {**memory, "begun": memory["begun"] + 1, "images": torch.tensor(len(data.index))}

    def loss(self, backbone, train, batch, ctx):
        loss, sums = super().loss(backbone, train, batch, ctx)
        return loss * float("nan" if int(ctx.memory["images"]) == self.failing else 1), sums

    def finish(self, backbone, train, sums, data, ctx):
        done = ctx.memory["done"] + 1
        assert sums["seen"] == 2 * len(data.index)  # two epochs
        return {**ctx.memory, "done": done}, {"rounds": done}


def remembered(call: Any, name: str) -> dict[int, float]:
    return {client: float(memory[name]) for client, memory in call.engine.memories.items()}


def test_memory_is_written_after_training(make_bench, watch):
    """Three clients take part in six rounds, but for one without images of the second task."""
    run = watch(make_bench(), Counting())
    assert [p["rounds"].item() for p in run.calls[0].payloads] == [1, 1, 1]
    last = run.calls[-1]
    assert remembered(last, "begun") == remembered(last, "done") == {0: 6, 1: 6, 2: 4}


def test_a_client_whose_training_fails_remembers_what_it_did_before(make_bench, watch):
    """The one with 13 images in the first task diverges in its two rounds."""
    run = watch(make_bench(), Counting(failing=13))
    last = run.calls[-1]
    assert remembered(last, "begun") == {0: 6, 1: 6, 2: 4} and remembered(last, "done") == {0: 4, 1: 6, 2: 4}
    assert [(r["task"], r["client"]) for r in run.result.rejected] == [(0, 0), (0, 0)]


def test_a_client_that_drops_out_or_is_not_drawn_remembers_what_it_did(make_bench, watch):
    run = watch(make_bench(participation=2, drop_rate=0.1), Counting())
    rounds = {c: sum(c in {x.number for x in call.clients} for call in run.calls) for c in range(3)}
    assert remembered(run.calls[-1], "done") == {c: n for c, n in rounds.items() if n}
    assert min(rounds.values()) > 0 and sum(rounds.values()) < 12


def test_what_is_no_pair_of_trees_is_said(make_bench):
    class Alone(Counting):
        def finish(self, *rest):
            return {"rounds": torch.tensor(1.0), "more": torch.tensor(1.0)}

    with pytest.raises(TypeError, match=r"counting.finish\(\) must return two trees"):
        make_bench().run(Alone())


@pytest.mark.parametrize("saved", [1, 3, 4])
def test_a_killed_run_goes_on_with_its_memories(make_bench, tmp_path, scaffold, saved):
    """Killed after so many snapshots: within a task, or between two. Not a bit is different."""
    rounds: list[int] = []

    class Killed(Exception):
        pass

    def kill() -> None:
        rounds.append(1)
        if len(rounds) == saved:
            raise Killed

    bench, path = make_bench(participation=2), tmp_path / "checkpoint"
    with pytest.raises(Killed):
        bench.run(scaffold, checkpoint=Checkpoint(path, kill))
    whole, resumed = (Run(bench, scaffold, 0, Silent(), c, None) for c in (None, Checkpoint(path)))
    assert whole.run().accuracy == resumed.run().accuracy
    pairs = [(whole.state, resumed.state)]
    pairs += [(memory, resumed.memories[client]) for client, memory in whole.memories.items()]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_scaffold_as_its_users_write_it(make_bench, watch, scaffold):
    """c_i+ = c_i - c + (x - y) / (K lr), c += |S| / N mean of the changes: from what went over the wire.

    Two of three clients take part in a round, and all begin at zero in every task.
    """
    bench = make_bench(participation=2)
    run = watch(bench, scaffold)
    own: dict[int, dict[str, torch.Tensor]] = {}
    for call, after in zip(run.rounds, [*run.rounds[1:], None], strict=True):
        state, changes = call.state, []
        if call.ctx.round == 0:
            own = {}
            assert not any(value.any() for value in select(state, "control.").values())
        for client, payload in zip(call.clients, call.payloads, strict=True):
            steps = 2 * -(-len(client.index) // 4)  # two epochs in batches of four
            before = own.get(client.number, {})
            own[client.number] = {}
            for name in select(state, "head."):
                c, x, old = state[f"control.{name}"], state[name], before.get(name, torch.zeros(()))
                new = old - c + (x - payload[name]) / (steps * 0.3)
                torch.testing.assert_close(payload[f"change.{name}"], new - old, rtol=1e-9, atol=1e-12)
                own[client.number][name] = new
            changes.append(payload)
        if after is None or after.ctx.round == 0:
            continue
        for name in select(state, "head."):
            mean = sum(p[f"change.{name}"] for p in changes) / len(changes)
            expected = state[f"control.{name}"] + len(changes) / 3 * mean
            torch.testing.assert_close(after.state[f"control.{name}"], expected, rtol=1e-9, atol=1e-12)
            total = sum(tree[name] for tree in own.values()) / 3
            torch.testing.assert_close(after.state[f"control.{name}"], total, rtol=1e-9, atol=1e-12)
