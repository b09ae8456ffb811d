"""Client training on a toy method whose numbers can be worked out by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import Context, Method, Optim, Training, Tree
from fczoo.core.lr_schedules import SCHEDULES
from fczoo.data.dataset import Images
from fczoo.data.views import Augment, ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from helpers_engine import TASK, Toy


class FeatureStore(ImageStore):
    """Serve features given by hand."""

    def __init__(self, backbone, features: list[list[float]], labels: list[int]):
        super().__init__(
            Images(np.zeros((len(labels), 16, 16, 3), np.uint8), np.array(labels)), backbone
        )
        self.features = torch.tensor(features, dtype=torch.float64)

    def query(self, index: Tensor) -> Tensor:
        return self.features[index]


@pytest.fixture
def train(backbone) -> Callable[..., list[Tree]]:
    """Return ``train(method, [(features, labels) of every client], ...)``.

    It returns the payloads of a round that starts at 0.
    """

    def go(
        method: Method,
        data,
        epochs=1,
        batch_size=10,
        together=1,
        number=0,
        rounds=1,
        start=(0.0, 0.0),
        report_progress=lambda *_: None,
    ):
        store = FeatureStore(
            backbone,
            [q for rows, _ in data for q in rows],
            [y for _, labels in data for y in labels],
        )
        ends = np.cumsum([len(labels) for _, labels in data])
        clients = [
            Client(10 + k, torch.arange(end - len(data[k][1]), end)) for k, end in enumerate(ends)
        ]
        engine = ClientEngine(
            method, backbone, store, Plan(epochs, batch_size, Augment(), seed=0, together=together)
        )
        state = {"w": torch.tensor(start, dtype=torch.float64), "shared": torch.zeros(1)}
        return engine.train(state, clients, Context(TASK, number, rounds, state), report_progress)

    return go


# With one sample q = (1, 0), y = 1 the gradient is 2 (w1 - 1) on the first weight and 0 on the
# second.
ONE = ([[1.0, 0.0]], [1])
FOUR = ([[1.0, 0.0]] * 4, [1] * 4)  # four steps of the same kind with batch size 1


def w(payload: Tree) -> list[float]:
    return payload["w"].tolist()


# --- one client


def test_one_step_of_gradient_descent(train):
    """Compare a step with the gradient worked out by hand.

    Residuals -1 and -2, gradient (2 (-1) 1, 2 (-2) 2) / 2 = (-1, -4).
    """
    payload, *further_payloads = train(Toy(), [([[1.0, 0.0], [0.0, 2.0]], [1, 2])])
    assert w(payload) == pytest.approx([0.1, 0.4], abs=1e-15)
    assert not further_payloads and (payload.num_samples, payload.client) == (2, 10)
    assert payload.keys() == {"w", "seen", "labels"}


def test_momentum_and_weight_decay(train):
    """Compare the steps of momentum and weight decay with values worked out by hand.

    g = 2 (w - 1) + 0.5 w; v = 0.9 v + g; w -= 0.1 v: 0, 0.2, 0.53; in the first step v = g = -2.
    """
    method = Toy(Optim("sgd", lr=0.1, momentum=0.9, weight_decay=0.5))
    assert w(train(method, [ONE], epochs=1)[0])[0] == pytest.approx(0.2)
    assert w(train(method, [ONE], epochs=2)[0])[0] == pytest.approx(
        0.2 - 0.1 * (0.9 * -2 + 2 * (0.2 - 1) + 0.5 * 0.2)
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("adam", 1 - 0.1), ("adamw", 1 - 0.1 * 0.5 * 1 - 0.1)]
)
def test_first_step_of_adam_and_adamw(train, name, expected):
    """Compare the first step of Adam with its rate.

    From w = 1 with label 0 the gradient is 2. Adam adds the decay to the gradient, AdamW to w.
    """
    payload = train(
        Toy(Optim(name, lr=0.1, weight_decay=0.5)), [([[1.0, 0.0]], [0])], start=(1.0, 0.0)
    )[0]
    assert w(payload)[0] == pytest.approx(expected, abs=1e-6)


def test_optimizer_state_is_reset_each_round(train):
    method = Toy(Optim("sgd", lr=0.1, momentum=0.9))
    first = w(train(method, [ONE])[0])
    assert w(train(method, [ONE], start=tuple(first))[0])[0] == pytest.approx(
        0.2 + 0.1 * 2 * 0.8
    )  # no momentum of the first round


def test_sums_cover_all_epochs_without_padding(train):
    payload = train(Toy(), [([[1.0, 0.0]] * 5, [1, 0, 1, 1, 0])], epochs=3, batch_size=2)[0]
    assert (payload["seen"], payload["labels"]) == (15, 9)


def test_each_epoch_shuffles_all_samples(backbone):
    steps = []

    class RecordsSteps(Toy):
        def loss(self, backbone, train, batch, ctx):
            steps.append(batch.query[:, 1].tolist())
            return super().loss(backbone, train, batch, ctx)

    store = FeatureStore(backbone, [[0.0, float(i)] for i in range(7)], [0] * 7)
    engine = ClientEngine(
        RecordsSteps(), backbone, store, Plan(epochs=3, batch_size=3, augment=Augment(), seed=0)
    )
    engine.train(
        {"w": torch.zeros(2, dtype=torch.float64)},
        [Client(0, torch.arange(7))],
        Context(TASK, 0, 1, {}),
    )
    assert [len(s) for s in steps] == [3, 3, 1] * 3
    epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


@pytest.mark.parametrize("together", [1, 2])
def test_tick_gets_mean_loss_of_each_client(train, together):
    """Pass each client's mean loss over its steps to ``report_progress``.

    Losses 1 and (0.2 - 1)^2 for one client; 1, 0.8^2, 0.8^4, ... for the other: a step leaves 0.8.
    """
    losses: list[float] = []
    train(
        Toy(),
        [ONE, FOUR],
        epochs=2,
        batch_size=1,
        together=together,
        report_progress=lambda client, loss, steps: losses.append(loss),
    )
    assert sorted(losses) == pytest.approx([sum(0.64**i for i in range(8)) / 8, (1 + 0.64) / 2])


# --- many clients in one forward


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize(
    "optim",
    [
        Optim("sgd", lr=0.1, momentum=0.9, weight_decay=0.5),
        Optim("adam", lr=0.1, weight_decay=0.5),
        Optim("adamw", lr=0.1, weight_decay=0.5),
    ],
    ids=lambda o: o.name,
)
def test_finished_client_stops_training(train, optim, together):
    """Stop a client with one batch after its step, whatever momentum or decay would add."""
    payloads = train(
        Toy(optim), [ONE, FOUR, ([[0.0, 1.0]] * 3, [1] * 3)], batch_size=1, together=together
    )
    assert [p.client for p in payloads] == [10, 11, 12]
    first = {"sgd": 0.2, "adam": 0.1, "adamw": 0.1}[optim.name]
    assert w(payloads[0]) == pytest.approx([first, 0.0], abs=1e-6)
    single = train(Toy(optim), [FOUR], batch_size=1)[0]
    assert w(payloads[1]) == pytest.approx(w(single), abs=1e-12)
    assert w(single)[0] > 1.9 * first
    assert w(payloads[2])[0] == 0.0


@pytest.mark.parametrize("together", [1, 2])
def test_gradients_are_clipped_per_client(train, together):
    """Clip each client's gradient by its own norm.

    Gradients (-30, -40) and (-0.3, -0.4): the first is cut to norm 1, the second is below it.
    """
    large, small = ([[3.0, 4.0]], [5]), ([[0.03, 0.04]], [5])
    payloads = train(Toy(clip=1.0), [large, small], together=together)
    assert w(payloads[0]) == pytest.approx([0.06, 0.08], abs=1e-6)
    assert w(payloads[1]) == pytest.approx([0.03, 0.04], abs=1e-9)


def test_random_views_do_not_depend_on_batched_clients(make_bench, small_method, watch):
    one, together = (
        watch(make_bench(augment="crop", together=k, rounds=1, epochs=1), small_method("hgp"))
        for k in (1, 3)
    )
    for a, b in zip(one.calls, together.calls, strict=True):
        for ours, theirs in zip(a.payloads, b.payloads, strict=True):
            for key, value in ours.items():
                torch.testing.assert_close(value, theirs[key], rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize(
    ("schedule", "number", "factor"),
    [("cosine", 0, 1.0), ("cosine", 1, 0.5), ("cosine_late", 1, 1.0), ("constant", 1, 1.0)],
)
def test_learning_rates_follow_round(train, schedule, number, factor):
    payload = train(Toy(Optim("sgd", lr=0.1, schedule=schedule)), [ONE], number=number, rounds=2)[0]
    assert w(payload)[0] == pytest.approx(0.2 * factor)


@pytest.mark.parametrize("together", [1, 2])
def test_local_learning_rates_follow_client_progress(train, together):
    """Compare local rates with each client's progress.

    Two steps at factors 1 and 1/2; four steps at (1 + cos(pi i / 4)) / 2.
    """
    two = ([[1.0, 0.0]] * 2, [1] * 2)
    payloads = train(
        Toy(Optim("sgd", lr=0.1, schedule="cosine_local")),
        [two, FOUR],
        batch_size=1,
        together=together,
    )
    for payload, steps in zip(payloads, (2, 4), strict=True):
        gap = math.prod(
            1 - 0.2 * (1 + math.cos(math.pi * i / steps)) / 2 for i in range(steps)
        )  # each step takes 2 lr of the gap
        assert w(payload)[0] == pytest.approx(1 - gap, abs=1e-12)


def test_longest_prefix_selects_optimizer(backbone):
    """Select the optimizer by the longest matching prefix: w.slow has its own rate."""

    @dataclass(frozen=True)
    class Two(Toy):
        def training(self):
            return Training({"w": Optim("sgd", lr=0.1), "w.slow": Optim("sgd", lr=0.01)}, ["query"])

        def loss(self, backbone, train, batch, ctx):
            return batch.mean(-(train["w.fast"] + train["w.slow"]) * batch.query[:, 0]), {}

    state = {
        "w.fast": torch.zeros((), dtype=torch.float64),
        "w.slow": torch.zeros((), dtype=torch.float64),
    }
    engine = ClientEngine(
        Two(), backbone, FeatureStore(backbone, [[1.0, 0.0]], [0]), Plan(1, 1, Augment(), 0)
    )
    payload = engine.train(state, [Client(0, torch.arange(1))], Context(TASK, 0, 1, {}))[0]
    assert (float(payload["w.fast"]), float(payload["w.slow"])) == pytest.approx((0.1, 0.01))


# --- errors


@pytest.mark.parametrize("together", [1, 2])
def test_client_with_nan_loss_uploads_nothing(train, together):
    losses = {}

    def report_progress(client, loss, steps):
        losses[client] = loss

    payloads = train(
        Toy(),
        [ONE, ([[float("nan"), 0.0]], [1])],
        together=together,
        report_progress=report_progress,
    )
    assert not payloads[1]
    assert payloads[0]["w"].isfinite().all()
    assert payloads[0].client == 10
    assert math.isfinite(losses[10]) and math.isnan(losses[11])


def test_client_with_overflowing_weights_uploads_nothing(train):
    (payload,) = train(Toy(Optim("sgd", lr=1e200)), [([[1e200, 0.0]], [1])])
    assert not payload  # the loss is 1, the step is not finite


def test_training_missing_tensor_raises(train):
    @dataclass(frozen=True)
    class Wrong(Toy):
        def training(self):
            return Training({"v.": Optim()}, ["query"])

    with pytest.raises(
        TypeError, match=r"training\(\) trains 'v\.', but the state has no such tensor"
    ):
        train(Wrong(), [ONE])
