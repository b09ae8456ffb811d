"""Memories of clients: written before and after training, kept without training, and saved."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fczoo.core.tree import select
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.run import FederatedRun
from helpers_engine import Toy


@dataclass(frozen=True)
class CountsTrainings(Toy):
    """Count preparations and finished trainings in the memory; ``failing`` clients diverge."""

    name = "counting"
    failing: int = -1

    def training(self):
        training = super().training()
        training.uploads["rounds"] = training.uploads["seen"]
        return training

    def begin_task(self, state, task, backbone, rng):
        return {"w": torch.zeros(backbone.dim, dtype=torch.float64)}

    def before_training(self, backbone, data, ctx):
        zero = torch.zeros((), dtype=torch.float64)
        memory = {"begun": zero, "done": zero, **ctx.memory}
        return {**memory, "begun": memory["begun"] + 1, "images": torch.tensor(len(data.index))}

    def loss(self, backbone, train, batch, ctx):
        loss, sums = super().loss(backbone, train, batch, ctx)
        return loss * float("nan" if int(ctx.memory["images"]) == self.failing else 1), sums

    def after_training(self, backbone, train, sums, data, ctx):
        rounds = ctx.memory["done"] + 1
        assert sums["seen"] == 2 * len(data.index)  # two epochs
        return {**ctx.memory, "done": rounds}, {"rounds": rounds}


def memory_values(call: Any, name: str) -> dict[int, float]:
    return {client: float(memory[name]) for client, memory in call.engine.memories.items()}


def test_memory_is_written_after_training(make_bench, watch):
    """Count the trainings of each client in its memory.

    Three clients take part in six rounds, but for one without images of the second task.
    """
    run = watch(make_bench(), CountsTrainings())
    assert [p["rounds"].item() for p in run.calls[0].payloads] == [1, 1, 1]
    last = run.calls[-1]
    assert memory_values(last, "begun") == memory_values(last, "done") == {0: 6, 1: 6, 2: 4}


def test_failed_training_keeps_old_memory(make_bench, watch):
    """Keep the old memory of a client whose training fails.

    The client with 13 images in the first task diverges in its two rounds.
    """
    run = watch(make_bench(), CountsTrainings(failing=13))
    last = run.calls[-1]
    assert memory_values(last, "begun") == {0: 6, 1: 6, 2: 4}
    assert memory_values(last, "done") == {
        0: 4,
        1: 6,
        2: 4,
    }
    assert [(r["task"], r["client"]) for r in run.result.rejected] == [(0, 0), (0, 0)]


def test_dropped_and_idle_clients_keep_memory(make_bench, watch):
    run = watch(make_bench(participation=2, drop_rate=0.1), CountsTrainings())
    rounds = {c: sum(c in {x.number for x in call.clients} for call in run.calls) for c in range(3)}
    assert memory_values(run.calls[-1], "done") == {c: n for c, n in rounds.items() if n}
    assert min(rounds.values()) > 0 and sum(rounds.values()) < 12


def test_after_training_must_return_two_trees(make_bench):
    class OneTree(CountsTrainings):
        def after_training(self, *rest):
            return {"rounds": torch.tensor(1.0), "more": torch.tensor(1.0)}

    with pytest.raises(TypeError, match=r"counting.after_training\(\) must return two trees"):
        make_bench().run(OneTree())


@pytest.mark.parametrize("saved", [1, 3, 4])
def test_killed_run_resumes_with_client_memory(make_bench, tmp_path, scaffold, saved):
    """Match an uninterrupted run, bit for bit.

    The run is killed after this many snapshots: within a task, or between two.
    """
    rounds: list[int] = []

    class SimulatedKill(Exception):
        pass

    def kill() -> None:
        rounds.append(1)
        if len(rounds) == saved:
            raise SimulatedKill

    bench, path = make_bench(participation=2), tmp_path / "checkpoint"
    with pytest.raises(SimulatedKill):
        bench.run(scaffold, checkpoint=Checkpoint(path, kill))
    reference, continuation = (
        FederatedRun(bench, scaffold, 0, Callback(), c, None) for c in (None, Checkpoint(path))
    )
    assert reference.run().accuracy == continuation.run().accuracy
    pairs = [(reference.state, continuation.state)]
    pairs += [
        (memory, continuation.memories[client]) for client, memory in reference.memories.items()
    ]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_tutorial_scaffold_follows_equations(make_bench, watch, scaffold):
    """Compare uploads and server state with SCAFFOLD's equations.

    They are c_i+ = c_i - c + (x - y) / (K lr), c += |S| / N mean of the changes, computed from
    uploads and broadcasts.
    Two of three clients take part in a round, and all begin at zero in every task.
    """
    bench = make_bench(participation=2)
    run = watch(bench, scaffold)
    controls: dict[int, dict[str, torch.Tensor]] = {}
    for call, next_call in zip(run.rounds, [*run.rounds[1:], None], strict=True):
        state, changes = call.state, []
        if call.ctx.round == 0:
            controls = {}
            assert not any(value.any() for value in select(state, "control.").values())
        for client, payload in zip(call.clients, call.payloads, strict=True):
            steps = 2 * -(-len(client.index) // 4)  # two epochs in batches of four
            old_controls = controls.get(client.number, {})
            controls[client.number] = {}
            for name in select(state, "head."):
                c, x, old = (
                    state[f"control.{name}"],
                    state[name],
                    old_controls.get(name, torch.zeros(())),
                )
                new = old - c + (x - payload[name]) / (steps * 0.3)
                torch.testing.assert_close(
                    payload[f"change.{name}"], new - old, rtol=1e-9, atol=1e-12
                )
                controls[client.number][name] = new
            changes.append(payload)
        if next_call is None or next_call.ctx.round == 0:
            continue
        for name in select(state, "head."):
            mean = sum(p[f"change.{name}"] for p in changes) / len(changes)
            new_control = state[f"control.{name}"] + len(changes) / 3 * mean
            torch.testing.assert_close(
                next_call.state[f"control.{name}"], new_control, rtol=1e-9, atol=1e-12
            )
            total = sum(tree[name] for tree in controls.values()) / 3
            torch.testing.assert_close(
                next_call.state[f"control.{name}"], total, rtol=1e-9, atol=1e-12
            )
