"""Records of a run: bytes, clients, statistics, and errors of incomplete methods."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fczoo
from fczoo import Method, Optim, Training, Tree, create_method, whole_tensors
from fczoo.core.errors import FczooError
from fczoo.federation.callbacks import Callback
from fczoo.federation.device import Plan
from fczoo.testing.toy_benchmark import small_method, toy_bench


@dataclass(frozen=True)
class ByteCountingMethod(Method):
    """Train ``w`` [2], broadcast ``fixed`` [5], and ``moving`` [3] every round.

    Keep ``secret`` [100].
    """

    name = "counted"
    server_only = ("secret",)

    def inputs(self) -> frozenset[str]:
        return frozenset({"query"})

    def training(self) -> Training:
        uploads = {
            "count": whole_tensors("counts"),
            "labels": whole_tensors("counts"),
            "query": whole_tensors("parameters"),
        }
        return Training({"w": Optim("sgd", lr=0.1)}, ["query"], uploads)

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {
            "w": torch.zeros(2),
            "fixed": torch.ones(5),
            "moving": torch.zeros(3),
            "secret": torch.zeros(100),
        }

    def loss(self, backbone, train, batch, ctx) -> tuple[Tensor, Tree]:
        assert {"w", "fixed", "moving"} <= ctx.shared.keys()
        assert "secret" not in ctx.shared
        assert train.keys() == {"w"}
        return batch.mean(batch.query[:, :2] @ train["w"]), {}

    def server_update(self, state, merged, ctx) -> Tree:
        return {
            **state,
            **merged,
            "fixed": state["fixed"].clone(),
            "moving": state["moving"] + 1,
            "secret": state["secret"] + 1,
        }

    def predict(self, backbone, state, batch, task) -> Tensor:
        return torch.zeros(len(batch.y), task.stop)


class Rounds(Callback):
    def __init__(self):
        self.records = []

    def round(self, record):
        self.records.append(record)


def run_with_records(bench, method: Method, seed: int = 0) -> tuple[list[dict], object]:
    rounds = Rounds()
    result = bench.run(method, seed, rounds)
    return rounds.records, result


def test_only_changed_tensors_are_sent_again(make_bench):
    """Send a tensor again only when it changed.

    float64: w 16, fixed 40, moving 24 bytes; never the private 800. Client 2 has no data in task 2.
    """
    records, result = run_with_records(make_bench(), ByteCountingMethod())
    everything, update = 16 + 40 + 24, 16 + 24
    assert [r["bytes_down"] for r in records] == [
        3 * everything,
        3 * update,
        2 * update,
        2 * update,
        3 * update,
        3 * update,
    ]
    assert result.bytes_down == sum(r["bytes_down"] for r in records)
    assert [r["bytes_up"] for r in records] == [
        k * (16 + 8 + 8) for k in (3, 3, 2, 2, 3, 3)
    ]  # w, num_samples, client
    assert result.bytes_up == sum(r["bytes_up"] for r in records)
    assert result.client_rounds == 16
    assert result.trained_scalars == 2


def test_records_list_clients_with_data(make_bench):
    records, _ = run_with_records(make_bench(), ByteCountingMethod())
    assert [(r["task"], r["round"], r["clients"]) for r in records] == [
        (0, 0, [0, 1, 2]),
        (0, 1, [0, 1, 2]),
        (1, 0, [0, 1]),
        (1, 1, [0, 1]),
        (2, 0, [0, 1, 2]),
        (2, 1, [0, 1, 2]),
    ]


@pytest.mark.parametrize(
    ("participation", "counts"),
    [(0.01, [1, 1, 1]), (0.5, [2, 1, 2]), (0.67, [2, 1, 2]), (1.0, [3, 2, 3])],
)
def test_participation_rounds_number_of_clients(make_bench, participation, counts):
    """Round the number of participants.

    The tasks have 3, 2 and 3 clients with data. A half is 1.5, 1 and 1.5: two, one and two clients.
    """
    records, result = run_with_records(
        make_bench(participation=participation, rounds=5), ByteCountingMethod()
    )
    assert [len(r["clients"]) for r in records] == [n for n in counts for _ in range(5)]
    assert all(r["clients"] == sorted(set(r["clients"])) for r in records)
    if participation == 0.5:
        assert len({tuple(r["clients"]) for r in records[:5]}) > 1, (
            "the same clients in every round"
        )
    assert result.client_rounds == 5 * sum(counts)


def test_participants_depend_only_on_seed(make_bench):
    participants = [
        [
            r["clients"]
            for r in run_with_records(
                make_bench(participation=0.5, rounds=5), ByteCountingMethod(), seed
            )[0]
        ]
        for seed in (0, 0, 1)
    ]
    assert participants[0] == participants[1] != participants[2]


@dataclass(frozen=True)
class CollectsSums(ByteCountingMethod):
    """Request sums over all data at both ends of a task."""

    name = "surveying"

    def training(self) -> Training:
        return replace(super().training(), collect_at={"task_start", "task_end"})

    def collect(self, phase, backbone, tree, batch, ctx) -> Tree:
        assert ctx.shared.keys() == tree.keys()
        assert tree.keys() - {"seen.task_start", "seen.task_end", "labels"} == {
            "w",
            "fixed",
            "moving",
        }  # what was broadcast
        return {
            "count": batch.w.sum(),
            "labels": (batch.y * batch.w).sum(),
            "query": (batch.query * batch.w[:, None]).sum(0),
        }

    def update_from(self, phase, state, sums, ctx) -> Tree:
        assert sums["count"] == ctx.num_samples
        return {**state, f"seen.{phase}": sums["query"], "labels": sums["labels"]}


@pytest.mark.parametrize("pass_size", [64, 3])
def test_collected_sums_match_centralised_data(make_bench, watch, batch_of, monkeypatch, pass_size):
    monkeypatch.setattr(
        "fczoo.federation.device.Plan", lambda *a: replace(Plan(*a), pass_size=pass_size)
    )
    method, bench = CollectsSums(), make_bench()
    run = watch(bench, method)
    assert [c.phase for c in run.calls] == ["task_start", "train", "train", "task_end"] * 3
    for task, state in run.states.items():
        index = torch.from_numpy(
            bench.stream.positions(bench.stream.train, bench.stream.tasks[task])
        )
        batch = batch_of(method, bench.train, index)
        for phase in ("task_start", "task_end"):
            torch.testing.assert_close(
                state[f"seen.{phase}"], batch.query.sum(0), rtol=1e-12, atol=1e-12
            )
        assert state["labels"] == batch.y.sum()
    counts = [[int(p["count"]) for p in c.payloads] for c in run.calls if c.phase == "task_start"]
    assert counts == [[13, 10, 7], [12, 8], [5, 1, 14]]


def test_collect_reads_state_before_and_after_rounds(make_bench, watch):
    calls = watch(make_bench(), CollectsSums()).calls
    assert [c.state["moving"][0].item() for c in calls[:4]] == [0, 0, 1, 2]


def test_incomplete_methods_raise(make_bench):
    with pytest.raises(
        TypeError, match=r"Empty defines before_training\(\) but not after_training\(\)"
    ):

        class Empty(ByteCountingMethod):
            def before_training(self, backbone, data, ctx):
                return ctx.memory

    @dataclass(frozen=True)
    class Sumless(CollectsSums):
        collect = Method.collect

    with pytest.raises(TypeError, match=r"Sumless collects at task_start but does not define coll"):
        make_bench().run(Sumless())

    @dataclass(frozen=True)
    class Careless(CollectsSums):
        update_from = Method.update_from

    with pytest.raises(TypeError, match=r"uploads sums at task_start but does not define update_f"):
        make_bench().run(Careless())

    @dataclass(frozen=True)
    class Lossless(ByteCountingMethod):
        loss = Method.loss

    with pytest.raises(TypeError, match=r"Lossless trains something but does not define loss\(\)"):
        make_bench().run(Lossless())


def test_logits_must_cover_classes_seen(make_bench):
    @dataclass(frozen=True)
    class Wide(ByteCountingMethod):
        def predict(self, backbone, state, batch, task):
            return torch.zeros(len(batch.y), task.classes)

    with pytest.raises(TypeError, match=r"predict returned shape \(9, 7\), expected \(9, 3\)"):
        make_bench().run(Wide())


def test_missing_dataset_options_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Warn if a method lacks the data set's values, unless others were chosen.

    HGP's rate on the server differs on digits.
    """
    small = {
        "tasks": 2,
        "clients": 2,
        "rounds": 1,
        "epochs": 1,
        "train_per_class": 2,
        "test_per_class": 1,
    }
    for method in (
        create_method("hgp", prefix_len=1),
        create_method("hgp", prefix_len=1, server_lr=0.02),
        create_method("hgp", "digits"),
    ):
        fczoo.run(method, dataset="digits", **small)
    messages = [r.message for r in caplog.records if "create_method" in r.message]
    assert messages == [
        "hgp has the general defaults of its options; on digits its defaults are server_lr=0.001; "
        "create it with "
        "fczoo.create_method('hgp', 'digits') to use these"
    ]


@pytest.mark.parametrize(
    ("settings", "method", "most", "task"),
    [
        ({"min_clients": 3}, "fedavg", 2, 2),  # one client has nothing in task 2
        ({"min_clients": 3}, "fedncm", 2, 2),
        ({"min_clients": 3, "participation": 0.6}, "fedavg", 2, 1),
        ({"min_clients": 2, "participation": 1 / 3}, "fedavg", 1, 1),
        ({"min_clients": 2, "participation": 1 / 3}, "fedncm", 0, 0),  # all clients are surveyed
        ({"min_clients": 2}, "fedavg", 0, 0),
        ({"min_clients": 2}, "joint", 1, 1),  # one client holds all images
        ({"min_clients": 3, "draw_among": "joined"}, "fedavg", 2, 2),
    ],
)
def test_too_few_clients_are_rejected_before_run(settings, method, most: int, task: int) -> None:
    bench = toy_bench(**settings)
    if not task:
        bench.check(small_method(method))
        return
    least = f"min_clients is {settings['min_clients']}"
    says = f"{least}, but in task {task} of {method} at most {most} client"
    with pytest.raises(FczooError, match=re.escape(says)):
        bench.check(small_method(method))
