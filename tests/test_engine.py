"""Client training and the runner's bookkeeping, on toy methods whose numbers can be worked out by hand."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import Batch, Context, Method, Optim, Task, Tree
from fczoo.data import Images
from fczoo.engine import Client, Engine, Plan
from fczoo.images import AUGMENTS, Augment, ImageStore
from fczoo.record import Silent
from fczoo.schedules import SCHEDULES

TASK = Task(0, 0, 2, 2, 1)
DESCENT = Optim("sgd", lr=0.1)


@dataclass(frozen=True)
class Toy(Method):
    """Linear regression of the label on two given features: loss = mean (w.q - y)^2."""

    name = "toy"
    optim: Optim = DESCENT
    clip: float | None = None

    def __post_init__(self) -> None:
        """Not for users: the options need no check."""

    def inputs(self) -> frozenset[str]:
        return frozenset({"query"})

    def optims(self) -> Mapping[str, Optim]:
        return {"w": self.optim}

    def clip_norm(self) -> float | None:
        return self.clip

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return {"w": torch.zeros(2, dtype=torch.float64)}

    def loss(self, backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        return batch.mean((batch.q @ train["w"] - batch.y).square()), {"seen": batch.w.sum(), "labels": (batch.y * batch.w).sum()}

    def predict(self, backbone, state, batch: Batch, task: Task) -> Tensor:
        return (batch.q[:, :1] - batch.q[:, :1]).expand(-1, task.stop) + torch.arange(task.stop)


class Given(ImageStore):
    """A store with features given by hand."""

    def __init__(self, backbone, features: list[list[float]], labels: list[int]):
        super().__init__(Images(np.zeros((len(labels), 16, 16, 3), np.uint8), np.array(labels)), backbone)
        self.features = torch.tensor(features, dtype=torch.float64)

    def query(self, index: Tensor) -> Tensor:
        return self.features[index]


@pytest.fixture
def train(backbone) -> Callable[..., list[Tree]]:
    """``train(method, [(features, labels) of every client], ...)``: payloads of one round that starts at w = 0."""

    def go(method: Method, data, epochs=1, batch_size=10, together=1, number=0, rounds=1, start=(0.0, 0.0), tick=lambda client, loss: None):
        store = Given(backbone, [q for rows, _ in data for q in rows], [y for _, labels in data for y in labels])
        ends = np.cumsum([len(labels) for _, labels in data])
        clients = [Client(10 + k, torch.arange(end - len(data[k][1]), end)) for k, end in enumerate(ends)]
        engine = Engine(method, backbone, store, Plan(epochs, batch_size, Augment(), seed=0, together=together))
        state = {"w": torch.tensor(start, dtype=torch.float64), "shared": torch.zeros(1)}
        return engine.train(state, clients, Context(TASK, number, rounds, state), tick)

    return go


# With one sample q = (1, 0), y = 1 the gradient is 2 (w1 - 1) on the first weight and 0 on the second.
ONE = ([[1.0, 0.0]], [1])
FOUR = ([[1.0, 0.0]] * 4, [1] * 4)  # four steps of the same kind with batch size 1


def w(payload: Tree) -> list[float]:
    return payload["w"].tolist()


# --- one client


def test_one_step_of_gradient_descent(train):
    """Residuals -1 and -2, gradient (2 (-1) 1, 2 (-2) 2) / 2 = (-1, -4)."""
    payload, *rest = train(Toy(), [([[1.0, 0.0], [0.0, 2.0]], [1, 2])])
    assert w(payload) == pytest.approx([0.1, 0.4], abs=1e-15)
    assert not rest and (payload["num_samples"], payload["client"]) == (2, 10)
    assert payload.keys() == {"w", "seen", "labels", "num_samples", "client"}


def test_momentum_and_weight_decay(train):
    """g = 2 (w - 1) + 0.5 w; v = 0.9 v + g; w -= 0.1 v: 0, 0.2, 0.53; in the first step v = g = -2."""
    method = Toy(Optim("sgd", lr=0.1, momentum=0.9, weight_decay=0.5))
    assert w(train(method, [ONE], epochs=1)[0])[0] == pytest.approx(0.2)
    assert w(train(method, [ONE], epochs=2)[0])[0] == pytest.approx(0.2 - 0.1 * (0.9 * -2 + 2 * (0.2 - 1) + 0.5 * 0.2))


@pytest.mark.parametrize(("name", "expected"), [("adam", 1 - 0.1), ("adamw", 1 - 0.1 * 0.5 * 1 - 0.1)])
def test_adam_steps_by_the_sign_first_and_adamw_decays_apart(train, name, expected):
    """From w = 1 with label 0: gradient 2, so Adam's first step is the rate; Adam adds decay to the gradient, AdamW to w."""
    payload = train(Toy(Optim(name, lr=0.1, weight_decay=0.5)), [([[1.0, 0.0]], [0])], start=(1.0, 0.0))[0]
    assert w(payload)[0] == pytest.approx(expected, abs=1e-6)


def test_optimizers_are_made_anew_in_every_round(train):
    method = Toy(Optim("sgd", lr=0.1, momentum=0.9))
    first = w(train(method, [ONE])[0])
    assert w(train(method, [ONE], start=tuple(first))[0])[0] == pytest.approx(0.2 + 0.1 * 2 * 0.8)  # no momentum of the first round


def test_sums_run_over_all_epochs_and_real_samples(train):
    payload = train(Toy(), [([[1.0, 0.0]] * 5, [1, 0, 1, 1, 0])], epochs=3, batch_size=2)[0]
    assert (payload["seen"], payload["labels"]) == (15, 9)


def test_every_sample_is_seen_once_an_epoch_in_another_order_each_time(backbone):
    steps = []

    class Noting(Toy):
        def loss(self, backbone, train, batch, ctx):
            steps.append(batch.q[:, 1].tolist())
            return super().loss(backbone, train, batch, ctx)

    store = Given(backbone, [[0.0, float(i)] for i in range(7)], [0] * 7)
    engine = Engine(Noting(), backbone, store, Plan(epochs=3, batch_size=3, augment=Augment(), seed=0))
    engine.train({"w": torch.zeros(2, dtype=torch.float64)}, [Client(0, torch.arange(7))], Context(TASK, 0, 1, {}))
    assert [len(s) for s in steps] == [3, 3, 1] * 3
    epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


@pytest.mark.parametrize("together", [1, 2])
def test_the_tick_gets_each_clients_mean_loss_over_its_own_steps(train, together):
    """Losses 1 and (0.2 - 1)^2 for one client; each step leaves 0.8 of the gap, so 1, 0.8^2, 0.8^4, ... for the other."""
    losses: list[float] = []
    train(Toy(), [ONE, FOUR], epochs=2, batch_size=1, together=together, tick=lambda client, loss: losses.append(loss))
    assert sorted(losses) == pytest.approx([sum(0.64**i for i in range(8)) / 8, (1 + 0.64) / 2])


# --- many clients in one forward


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize(
    "optim",
    [Optim("sgd", lr=0.1, momentum=0.9, weight_decay=0.5), Optim("adam", lr=0.1, weight_decay=0.5), Optim("adamw", lr=0.1, weight_decay=0.5)],
    ids=lambda o: o.name,
)
def test_a_finished_client_stands_still(train, optim, together):
    """The client with one batch is done after its own step, whatever momentum or decay would do in the others' later steps."""
    payloads = train(Toy(optim), [ONE, FOUR, ([[0.0, 1.0]] * 3, [1] * 3)], batch_size=1, together=together)
    assert [int(p["client"]) for p in payloads] == [10, 11, 12]
    first = {"sgd": 0.2, "adam": 0.1, "adamw": 0.1}[optim.name]
    assert w(payloads[0]) == pytest.approx([first, 0.0], abs=1e-6)
    alone = train(Toy(optim), [FOUR], batch_size=1)[0]
    assert w(payloads[1]) == pytest.approx(w(alone), abs=1e-12) and w(alone)[0] > 1.9 * first
    assert w(payloads[2])[0] == 0.0


@pytest.mark.parametrize("together", [1, 2])
def test_each_clients_gradient_is_clipped_by_its_own_norm(train, together):
    """Gradients (-30, -40) and (-0.3, -0.4): the first is cut to norm 1, the second is below it."""
    large, small = ([[3.0, 4.0]], [5]), ([[0.03, 0.04]], [5])
    payloads = train(Toy(clip=1.0), [large, small], together=together)
    assert w(payloads[0]) == pytest.approx([0.06, 0.08], abs=1e-6)
    assert w(payloads[1]) == pytest.approx([0.03, 0.04], abs=1e-9)


def test_random_views_do_not_depend_on_who_trains_together(make_bench, small_method, watch):
    one, together = (watch(make_bench(augment="crop", together=k, rounds=1, epochs=1), small_method("hgp")) for k in (1, 3))
    for a, b in zip(one.calls, together.calls, strict=True):
        for ours, theirs in zip(a.payloads, b.payloads, strict=True):
            for key, value in ours.items():
                torch.testing.assert_close(value, theirs[key], rtol=1e-9, atol=1e-9)


# --- what batches hold


@dataclass(frozen=True)
class Looking(Toy):
    """Notes the batches of the loss and of the pass after it."""

    view: str = "test"

    def inputs(self):
        return frozenset({"images", "query"})

    def stats_view(self):
        return self.view

    def loss(self, backbone, train, batch, ctx):
        BATCHES.append(batch)
        return batch.mean(batch.q[:, 0] * train["w"][0]), {}

    def stats(self, backbone, train, batch, ctx):
        BATCHES.append(batch)
        return {"count": batch.w.sum(), "weighted": (batch.w * batch.q[:, 0]).sum()}


BATCHES: list[Batch] = []


@pytest.fixture
def look(make_bench):
    def go(method: Method, augment: Augment, cache_queries: bool = False, pass_size: int = 64):
        """Store, batch of the only training step, batches of the pass after it, payload; the client has six images."""
        BATCHES.clear()
        bench = make_bench()
        engine = Engine(method, bench.backbone, bench.train, Plan(1, 6, augment, 0, cache_queries=cache_queries, pass_size=pass_size))
        state = {"w": torch.zeros(2, dtype=torch.float64)}
        payload = engine.train(state, [Client(0, torch.arange(20, 26))], Context(TASK, 0, 1, state))[0]
        return bench.train, BATCHES[0], BATCHES[1:], payload

    return go


@pytest.mark.parametrize("cached", [False, True])
def test_training_queries_are_of_the_same_view_unless_kept(look, backbone, cached):
    store, step, _, _ = look(Looking(), AUGMENTS["crop"], cache_queries=cached)
    tests = store.view(torch.arange(20, 26))
    assert not any(torch.allclose(x, t, atol=0.1) for x in step.x for t in tests)
    of_random, of_test = backbone(step.x), store.query(torch.arange(20, 26))
    if cached:
        assert sorted(step.q[:, 0].tolist()) == sorted(of_test[:, 0].tolist())
    else:
        torch.testing.assert_close(step.q, of_random, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("view", ["test", "train"])
def test_the_pass_after_training_has_the_view_asked_for(look, backbone, view):
    store, _, (after,), payload = look(Looking(view=view), AUGMENTS["crop"])
    same = [torch.equal(x, t) for x, t in zip(after.x, store.view(torch.arange(20, 26)), strict=True)]
    assert all(same) if view == "test" else not any(same)
    torch.testing.assert_close(after.q, backbone(after.x), rtol=1e-10, atol=1e-10)
    assert payload["count"] == 6


@pytest.mark.parametrize("view", ["test", "train"])
def test_the_pass_after_training_may_be_cut_anywhere(look, view):
    _, _, whole, one = look(Looking(view=view), AUGMENTS["crop"])
    _, _, parts, other = look(Looking(view=view), AUGMENTS["crop"], pass_size=4)
    assert [len(b.y) for b in whole] == [6] and [len(b.y) for b in parts] == [4, 2]
    torch.testing.assert_close(one["weighted"], other["weighted"], rtol=1e-10, atol=1e-10)


def test_batches_hold_only_what_is_asked_for(make_bench, batch_of):
    bench, index = make_bench(), torch.arange(4)
    for wanted, shapes in {
        ("images",): ((4, 3, 16, 16), (4, 0)),
        ("query",): ((4, 0), (4, 32)),
        ("images", "query"): ((4, 3, 16, 16), (4, 32)),
    }.items():

        class Asking(Toy):
            def inputs(self, wanted=wanted):
                return frozenset(wanted)

        batch = batch_of(Asking(), bench.train, index)
        assert (batch.x.shape, batch.q.shape) == shapes


# --- learning rates


@pytest.mark.parametrize(
    ("schedule", "round", "progress", "expected"),
    [
        ("constant", 3, 0.7, 1.0),
        ("cosine", 0, 0.7, 1.0),
        ("cosine", 1, 0.7, (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 2, 0.7, 0.5),
        ("cosine", 3, 0.7, (1 - math.cos(math.pi / 4)) / 2),
        ("cosine_late", 0, 0.7, 1.0),
        ("cosine_late", 1, 0.7, 1.0),
        ("cosine_late", 3, 0.7, 0.5),
        ("cosine_local", 3, 0.0, 1.0),
        ("cosine_local", 3, 0.5, 0.5),
        ("cosine_local", 3, 0.75, (1 - math.cos(math.pi / 4)) / 2),
    ],
)
def test_schedules_by_hand(schedule, round, progress, expected):
    assert SCHEDULES[schedule](round, 4, progress) == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "number", "factor"), [("cosine", 0, 1.0), ("cosine", 1, 0.5), ("cosine_late", 1, 1.0), ("constant", 1, 1.0)])
def test_rates_follow_the_round(train, schedule, number, factor):
    payload = train(Toy(Optim("sgd", lr=0.1, schedule=schedule)), [ONE], number=number, rounds=2)[0]
    assert w(payload)[0] == pytest.approx(0.2 * factor)


@pytest.mark.parametrize("together", [1, 2])
def test_local_rates_follow_each_clients_own_progress(train, together):
    """Two steps at factors 1 and 1/2; four steps at (1 + cos(pi i / 4)) / 2."""
    two = ([[1.0, 0.0]] * 2, [1] * 2)
    payloads = train(Toy(Optim("sgd", lr=0.1, schedule="cosine_local")), [two, FOUR], batch_size=1, together=together)
    for payload, steps in zip(payloads, (2, 4), strict=True):
        left = math.prod(1 - 0.2 * (1 + math.cos(math.pi * i / steps)) / 2 for i in range(steps))  # each step takes 2 lr of the gap
        assert w(payload)[0] == pytest.approx(1 - left, abs=1e-12)


def test_prefixes_have_optimizers_of_their_own(backbone):
    """The longest prefix that fits decides: w.slow has its own rate."""

    @dataclass(frozen=True)
    class Two(Toy):
        def optims(self):
            return {"w": Optim("sgd", lr=0.1), "w.slow": Optim("sgd", lr=0.01)}

        def loss(self, backbone, train, batch, ctx):
            return batch.mean(-(train["w.fast"] + train["w.slow"]) * batch.q[:, 0]), {}

    state = {"w.fast": torch.zeros((), dtype=torch.float64), "w.slow": torch.zeros((), dtype=torch.float64)}
    engine = Engine(Two(), backbone, Given(backbone, [[1.0, 0.0]], [0]), Plan(1, 1, Augment(), 0))
    payload = engine.train(state, [Client(0, torch.arange(1))], Context(TASK, 0, 1, {}))[0]
    assert (float(payload["w.fast"]), float(payload["w.slow"])) == pytest.approx((0.1, 0.01))


# --- what goes wrong


@pytest.mark.parametrize("together", [1, 2])
def test_a_client_whose_loss_is_no_number_has_nothing_to_say(train, together):
    losses = {}
    payloads = train(Toy(), [ONE, ([[float("nan"), 0.0]], [1])], together=together, tick=losses.__setitem__)
    assert payloads[1] == {} and payloads[0]["w"].isfinite().all() and payloads[0]["client"] == 10
    assert math.isfinite(losses[10]) and math.isnan(losses[11])


def test_a_client_whose_weights_overflow_has_nothing_to_say(train):
    assert train(Toy(Optim("sgd", lr=1e200)), [([[1e200, 0.0]], [1])]) == [{}]  # the loss is 1, the step is not finite


def test_a_method_that_trains_nothing_it_has_is_told(train):
    @dataclass(frozen=True)
    class Wrong(Toy):
        def optims(self):
            return {"v.": Optim()}

    with pytest.raises(TypeError, match=r"optims\(\) trains 'v\.', but the state has no such tensor"):
        train(Wrong(), [ONE])


def test_logits_must_cover_the_classes_seen(make_bench):
    @dataclass(frozen=True)
    class Wide(Counted):
        def predict(self, backbone, state, batch, task):
            return torch.zeros(len(batch.y), task.classes)

    with pytest.raises(TypeError, match=r"predict gave \(9, 7\), expected \(9, 3\)"):
        make_bench().run(Wide())


# --- surveys and bookkeeping of a run


@dataclass(frozen=True)
class Counted(Method):
    """Trains ``w`` [2]; broadcasts ``fixed`` [5] and, anew in every round, ``moving`` [3]; keeps ``secret`` [100]."""

    name = "counted"
    private = ("secret",)

    def inputs(self) -> frozenset[str]:
        return frozenset({"query"})

    def optims(self) -> Mapping[str, Optim]:
        return {"w": Optim("sgd", lr=0.1)}

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {"w": torch.zeros(2), "fixed": torch.ones(5), "moving": torch.zeros(3), "secret": torch.zeros(100)}

    def loss(self, backbone, train, batch, ctx) -> tuple[Tensor, Tree]:
        assert {"w", "fixed", "moving"} <= ctx.shared.keys() and "secret" not in ctx.shared and train.keys() == {"w"}
        return batch.mean(batch.q[:, :2] @ train["w"]), {}

    def server_update(self, state, merged, task, backbone, rng) -> Tree:
        return {**state, **merged, "fixed": state["fixed"].clone(), "moving": state["moving"] + 1, "secret": state["secret"] + 1}

    def predict(self, backbone, state, batch, task) -> Tensor:
        return torch.zeros(len(batch.y), task.stop)


class Rounds(Silent):
    def __init__(self):
        self.records = []

    def round(self, record):
        self.records.append(record)


def observed(bench, method: Method, seed: int = 0) -> tuple[list[dict], object]:
    rounds = Rounds()
    result = bench.run(method, seed, rounds)
    return rounds.records, result


def test_a_tensor_is_sent_again_only_when_it_changed(make_bench):
    """float64: w 16, fixed 40, moving 24 bytes; never the private 800. Client 2 has no data in the second task."""
    records, result = observed(make_bench(), Counted())
    everything, changed = 16 + 40 + 24, 16 + 24
    assert [r["bytes_down"] for r in records] == [3 * everything, 3 * changed, 2 * changed, 2 * changed, 3 * changed, 3 * changed]
    assert result.bytes_down == sum(r["bytes_down"] for r in records)
    assert [r["bytes_up"] for r in records] == [k * (16 + 8 + 8) for k in (3, 3, 2, 2, 3, 3)]  # w, num_samples, client
    assert result.bytes_up == sum(r["bytes_up"] for r in records) and result.client_rounds == 16
    assert result.trained_scalars == 2


def test_records_name_the_clients_that_have_data(make_bench):
    records, _ = observed(make_bench(), Counted())
    assert [(r["task"], r["round"], r["clients"]) for r in records] == [
        (0, 0, [0, 1, 2]),
        (0, 1, [0, 1, 2]),
        (1, 0, [0, 1]),
        (1, 1, [0, 1]),
        (2, 0, [0, 1, 2]),
        (2, 1, [0, 1, 2]),
    ]


@pytest.mark.parametrize(("participation", "counts"), [(0.0, [1, 1, 1]), (0.5, [2, 1, 2]), (0.67, [2, 1, 2]), (1.0, [3, 2, 3])])
def test_participation_rounds_the_number_of_clients_with_data(make_bench, participation, counts):
    """Of 3, 2 and 3 clients; a half of three rounds to two, of two to one."""
    records, result = observed(make_bench(participation=participation, rounds=5), Counted())
    assert [len(r["clients"]) for r in records] == [n for n in counts for _ in range(5)]
    assert all(r["clients"] == sorted(set(r["clients"])) for r in records)
    if participation == 0.5:
        assert len({tuple(r["clients"]) for r in records[:5]}) > 1, "the same clients in every round"
    assert result.client_rounds == 5 * sum(counts)


def test_participants_depend_on_the_seed_alone(make_bench):
    drawn = [[r["clients"] for r in observed(make_bench(participation=0.5, rounds=5), Counted(), seed)[0]] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@dataclass(frozen=True)
class Surveying(Counted):
    """Asks for sums over all data at both ends of a task."""

    name = "surveying"

    def surveys(self):
        return frozenset({"begin", "end"})

    def survey(self, moment, backbone, state, batch, task) -> Tree:
        assert state.keys() - {"seen.begin", "seen.end", "labels"} == {"w", "fixed", "moving"}  # what was broadcast
        return {"count": batch.w.sum(), "labels": (batch.y * batch.w).sum(), "query": (batch.q * batch.w[:, None]).sum(0)}

    def absorb(self, moment, state, sums, task) -> Tree:
        assert sums["count"] == sums["num_samples"]
        return {**state, f"seen.{moment}": sums["query"], "labels": sums["labels"]}


@pytest.mark.parametrize("pass_size", [64, 3])
def test_surveyed_sums_are_those_of_the_data_in_one_place(make_bench, watch, batch_of, monkeypatch, pass_size):
    monkeypatch.setattr("fczoo.rounds.Plan", lambda *a: replace(Plan(*a), pass_size=pass_size))
    method, bench = Surveying(), make_bench()
    run = watch(bench, method)
    assert [c.moment for c in run.calls] == ["begin", "train", "train", "end"] * 3
    for task, state in run.states.items():
        index = torch.from_numpy(bench.stream.positions(bench.stream.train, bench.stream.tasks[task]))
        batch = batch_of(method, bench.train, index)
        for moment in ("begin", "end"):
            torch.testing.assert_close(state[f"seen.{moment}"], batch.q.sum(0), rtol=1e-12, atol=1e-12)
        assert state["labels"] == batch.y.sum()
    counts = [[int(p["count"]) for p in c.payloads] for c in run.calls if c.moment == "begin"]
    assert counts == [[13, 10, 7], [12, 8], [5, 1, 14]]


def test_a_survey_sees_the_state_before_and_after_the_rounds(make_bench, watch):
    calls = watch(make_bench(), Surveying()).calls
    assert [c.state["moving"][0].item() for c in calls[:4]] == [0, 0, 1, 2]


def test_methods_that_promise_more_than_they_define_are_told(make_bench):
    @dataclass(frozen=True)
    class Empty(Counted):
        def surveys(self):
            return frozenset({"begin"})

        loss = Method.loss

    with pytest.raises(TypeError, match=r"Empty asks for a survey but does not define survey\(\)"):
        make_bench().run(Empty())

    @dataclass(frozen=True)
    class Lossless(Counted):
        loss = Method.loss

    with pytest.raises(TypeError, match=r"Lossless trains something but does not define loss\(\)"):
        make_bench().run(Lossless())
