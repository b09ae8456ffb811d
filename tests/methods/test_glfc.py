"""GLFC: losses, exemplars, and selection of the old model by reconstructed images."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import Context, Task, Tree, create_method
from fczoo.baselines._glfc_inversion import (
    image_gradient,
    lenet,
    lenet_logits,
    mismatch,
    read_label,
    reconstruct,
)
from fczoo.baselines._glfc_task_detection import mean_entropy
from fczoo.core.payload import Payload
from fczoo.core.tree import select
from fczoo.data.views import Augment
from fczoo.federation.batches import LocalImages
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from fczoo.functional.exemplars import herding, warn_once
from helpers_methods import CLOSE, DIM, batch
from helpers_payload import server_context


def test_glfc_weights_average_to_one_in_each_group(noise):
    old_classes = torch.tensor([True, True, False, False])
    data = batch(
        noise(7, 2),
        [0, 1, 1, 2, 3, 3, 2],
        w=torch.tensor([1.0, 1, 1, 1, 1, 1, 0], dtype=torch.float64),
    )
    weights = create_method("glfc").weights(noise(7, 4).requires_grad_(), data, old_classes)
    assert not weights.requires_grad
    assert float(weights[:3].mean()) == pytest.approx(1)
    assert float(weights[3:6].mean()) == pytest.approx(1)


def test_glfc_losses_without_old_classes_are_cross_entropy(noise):
    """Reduce both losses to binary cross-entropy without columns of an old model."""
    logits, data = noise(5, 4), batch(noise(5, 2), [0, 1, 2, 3, 0])
    plain = F.binary_cross_entropy_with_logits(logits, F.one_hot(data.y, 4).double())
    torch.testing.assert_close(create_method("glfc").relations(logits, data, 0), plain, **CLOSE)
    torch.testing.assert_close(
        create_method("glfc").compensated_loss(logits, data, torch.zeros(4, dtype=torch.bool)),
        plain,
        **CLOSE,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 14), st.integers(0, 10**6))
def test_herding_prefix_equals_shorter_herding(n, short, long, seed):
    features = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    short, long = sorted((short, long))
    full_list = herding(features, long).tolist()
    assert len(set(full_list)) == len(full_list) == min(long, n)
    assert herding(features, short).tolist() == full_list[:short]


def test_glfc_entropy_by_hand():
    """Compare the entropy with values worked out by hand.

    Equal logits over four classes give ln 4, up to 1e-5 in the logarithm; certain ones give 0.
    """
    fair, certain = torch.zeros(1, 4), torch.tensor([[99.0, 0, 0, 0]])
    assert float(mean_entropy(fair)) == pytest.approx(-math.log(0.25 + 1e-5), abs=1e-6)
    assert float(mean_entropy(certain)) == pytest.approx(0, abs=2e-5)
    assert float(mean_entropy(torch.cat([fair, certain]))) == pytest.approx(
        math.log(4) / 2, abs=1e-4
    )


def set_up_client(bench, method, task: Task) -> tuple[ClientEngine, LocalImages, Tree]:
    engine = ClientEngine(method, bench.backbone, bench.train, Plan(1, 4, Augment(), seed=0))
    client = bench.clients(task)[0]
    return (
        engine,
        engine.trainer.images_of(client),
        method.begin_task({}, task, bench.backbone, torch.Generator().manual_seed(0)),
    )


def test_glfc_signals_each_entropy_rise(make_bench, tasks):
    """Signal twice: the entropy rises from 0 to ln 3, falls to 0 and rises to ln 3 again."""
    bench, method = make_bench(), create_method("glfc", threshold=1.0, proxy="last", tune="head")
    _, data, state = set_up_client(bench, method, tasks[0])
    memory: Tree = {}
    for sure, signal, entropy in (
        (0, True, math.log(3)),
        (99, False, 0),
        (99, False, 0),
        (0, True, math.log(3)),
    ):
        bias = torch.zeros(7).double()
        bias[0] = sure
        state = {**state, "head.weight": torch.zeros(7, DIM).double(), "head.bias": bias}
        memory = method.before_training(
            bench.backbone, data, Context(tasks[0], 0, 3, state, memory)
        )
        assert bool(memory["signal"]) == signal
        assert float(memory["entropy"]) == pytest.approx(entropy, abs=1e-4)


def test_glfc_signals_new_task_once_or_warns(make_bench, tasks, caplog):
    warn_once.cache_clear()  # other tests may have logged the same warning
    bench = make_bench()
    scale = math.log(10) / math.log(
        3
    )  # with three classes a threshold of ln 10 signals at a rise of ln 3
    for threshold, signals in (
        (math.log(3) * scale - 0.01, [True, False, False]),
        (math.log(3) * scale + 0.01, [False] * 3),
    ):
        method = create_method("glfc", threshold=threshold, proxy="last", tune="head")
        _, data, state = set_up_client(bench, method, tasks[0])
        state = {
            **state,
            "head.weight": torch.zeros(7, DIM).double(),
            "head.bias": torch.zeros(7).double(),
        }  # equal logits: entropy ln 3
        memory: Tree = {}
        for signal in signals:
            memory = method.before_training(
                bench.backbone, data, Context(tasks[0], 0, 3, state, memory)
            )
            assert bool(memory["signal"]) == signal
            assert float(memory["entropy"]) == pytest.approx(math.log(3), abs=1e-4)
    method.before_training(
        bench.backbone, data, Context(tasks[0], 2, 3, state, memory)
    )  # the last round
    assert "a client did not detect task 1 by the entropy" in caplog.text


@pytest.mark.parametrize("budget", [0, 1, 5, 100])
def test_glfc_memory_stays_within_budget(make_bench, small_method, watch, caplog, budget):
    run = watch(make_bench(), small_method("glfc", detector="oracle", proxy="last", memory=budget))
    assert ("has no room for one image of each" in caplog.text) == (budget == 1)
    labels, client_indices = run.bench.train.labels, [set(), set(), set()]
    for call in run.rounds:
        for client in call.clients:
            client_indices[client.number] |= set(client.index.tolist())
    for client, memory in run.rounds[-1].engine.memories.items():
        exemplars = memory["exemplar.index"].tolist()
        assert len(exemplars) <= budget
        assert len(set(exemplars)) == len(exemplars)
        assert set(exemplars) <= client_indices[client]
    final = run.rounds[-1].engine.memories[0]
    exemplars = torch.bincount(labels[final["exemplar.index"]], minlength=7)
    room = budget // int(final["learned"].sum())
    class_counts = torch.bincount(
        labels[
            torch.cat(
                [c.index for call in run.rounds for c in call.clients if c.number == 0]
            ).unique()
        ],
        minlength=7,
    )
    assert exemplars[:5].tolist() == [min(room, n) for n in class_counts[:5].tolist()]
    assert not exemplars[5:].any()


def test_images_of_missed_task_become_exemplars(make_bench, tasks):
    """Keep exemplars of a task in which the client was never drawn.

    It is drawn in the first and the last of three tasks, and keeps images of both earlier ones.
    """
    bench = make_bench()
    method = create_method("glfc", detector="oracle", proxy="last", tune="head")
    memory: Tree = {}
    for task in (tasks[0], tasks[2]):
        engine, _, state = set_up_client(bench, method, task)
        client = bench.clients(task)[0]
        data = engine.trainer.images_of(client)
        memory = method.before_training(bench.backbone, data, Context(task, 0, 1, state, memory))
    exemplar_labels = bench.train.labels[memory["exemplar.index"]]
    assert exemplar_labels.unique().tolist() == list(range(5))
    assert memory["learned"].tolist() == [True] * 5 + [False] * 2
    client_indices = torch.cat([bench.clients(task)[0].index for task in tasks[:2]])
    assert sorted(memory["exemplar.index"].tolist()) == sorted(client_indices.tolist())


@pytest.mark.parametrize("raw", [False, True])
def test_glfc_perturbation_step_by_hand(make_bench, batch_of, tasks, rng, raw):
    """Compare one perturbation step with x - lr (g + 1e-5 x).

    The gradient g is taken at the normalised image or, with ``perturb_raw``, at x itself.
    """
    bench = make_bench()
    method = create_method(
        "glfc", perturb_raw=raw, perturb_steps=1, perturb_lr=50.0, tune="lora", head_init="default"
    )
    state = method.begin_task({}, tasks[0], bench.backbone, rng)
    train = {k: v.to(torch.float64) for k, v in select(state, "head.", "lora.").items()}
    data = batch_of(method, bench.train, torch.arange(1))
    data = data._replace(y=torch.tensor([1]))
    perturbation = method.perturb_image(bench.backbone, train, data, 3)
    config = bench.backbone.config
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (config.mean, config.std)
    )
    image = (data.x * std + mean).float().requires_grad_()
    network_input = image if raw else (image - mean.float()) / std.float()
    logits = (
        bench.backbone(network_input, select(train, "lora.")) @ train["head.weight"].T
        + train["head.bias"]
    )
    target = F.one_hot(data.y, 3).to(logits)
    (gradient,) = torch.autograd.grad(
        F.binary_cross_entropy_with_logits(logits[:, :3], target), image
    )
    assert gradient.abs().max() > 1e-5
    torch.testing.assert_close(
        perturbation, (image - 50.0 * (gradient + 1e-5 * image)).detach(), rtol=1e-4, atol=1e-5
    )


def test_glfc_memory_holds_exemplars_of_old_classes(make_bench, small_method, watch):
    run = watch(
        make_bench(batch_size=100, epochs=1),
        small_method("glfc", detector="oracle", proxy="last", memory=6),
    )
    call = next(c for c in run.rounds if c.ctx.task.index == 2)
    memory = call.engine.memories[0]
    assert len(memory["exemplar.index"])
    assert (run.bench.train.labels[memory["exemplar.index"]] < 5).all()


def test_glfc_last_proxy_uses_final_model_of_previous_task(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("glfc", proxy="last"))
    for call in run.rounds:
        old = select(call.state, "old.")
        assert bool(old) == (call.ctx.task.index > 0)
        for name, value in old.items():
            assert torch.equal(
                value, run.states[call.ctx.task.index - 1][name.removeprefix("old.")]
            )


QUICK = {"inversion_steps": 2, "inversion_inner": 2}


def test_glfc_uploads_gradients_only_with_signal(make_bench, small_method, watch):
    """Upload gradients only in a round with a signal.

    The oracle signals in the first round of each task. A threshold that is never reached gives no
    signal.
    """
    run = watch(make_bench(epochs=1), small_method("glfc", detector="oracle", **QUICK))
    assert {call.ctx.round for call in run.rounds} == {0, 1}
    for call in run.rounds:
        for client, payload in zip(call.clients, call.payloads, strict=True):
            gradients = select(payload, "image_gradient.")
            assert bool(gradients) == (call.ctx.round == 0)
            if gradients:
                classes = run.bench.train.labels[client.index].unique()
                assert all(len(v) == len(classes) for v in gradients.values())
                labels = [
                    int(
                        read_label(
                            {k.removeprefix("image_gradient."): v[i] for k, v in gradients.items()}
                        )
                    )
                    for i in range(len(classes))
                ]
                assert labels == classes.tolist()
    deaf = watch(make_bench(epochs=1, rounds=1), small_method("glfc", threshold=1e6, **QUICK))
    assert not any(
        select(payload, "image_gradient.") for call in deaf.rounds for payload in call.payloads
    )


def test_lenet_parameter_count_matches_official_code():
    """Count 8,136 weights in the convolutions and 769 per class.

    FPPL counts 161,936 with 200 classes.
    """
    for classes, size in ((200, 161_936), (100, 85_036)):
        assert sum(v.numel() for v in lenet(classes, torch.Generator()).values()) == size


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10**6))
def test_label_is_recovered_from_gradient(label, seed):
    rng = torch.Generator().manual_seed(seed)
    net = lenet(7, rng)
    assert (
        int(
            read_label(
                image_gradient(net, torch.rand(3, 32, 32, generator=rng), torch.tensor(label))
            )
        )
        == label
    )


def test_image_gradient_matches_finite_differences(rng):
    net = {k: v.double() for k, v in lenet(4, rng).items()}
    image, label, step = (
        torch.rand(3, 32, 32, generator=rng, dtype=torch.float64),
        torch.tensor(2),
        1e-6,
    )
    gradient = image_gradient(net, image, label)
    for name, at in (
        ("lenet.linear.bias", (1,)),
        ("lenet.conv0.weight", (3, 1, 2, 2)),
        ("lenet.conv2.bias", (5,)),
    ):
        ends = []
        for sign in (1, -1):
            neighbour = {k: v.clone() for k, v in net.items()}
            neighbour[name][at] += sign * step
            ends.append(F.cross_entropy(lenet_logits(neighbour, image[None]), label[None]))
        assert float(gradient[name][at]) == pytest.approx(
            float((ends[0] - ends[1]) / (2 * step)), rel=1e-4, abs=1e-8
        )


@pytest.mark.parametrize("name", ["glfc", "lga"])
def test_incomplete_gradient_is_ignored(name, rng):
    """Ignore the gradient of a hostile client that lacks a tensor or has an extra one."""
    gradient = image_gradient(lenet(7, rng), torch.rand(3, 32, 32), torch.tensor(1))
    complete = {f"image_gradient.{k}": v[None] for k, v in gradient.items()}
    part = {k: v for k, v in complete.items() if k != "image_gradient.lenet.linear.weight"}
    payloads = [
        Payload(tensors, k, 5)
        for k, tensors in enumerate([part, complete, {**complete, "image_gradient.x": part}, {}])
    ]
    pool = create_method(name).aggregate(payloads, lambda _: {})
    assert len(pool) == 8
    assert all(value.equal(complete[k]) for k, value in pool.items())


def test_reconstruction_reduces_gradient_mismatch(rng):
    net = lenet(4, rng)
    target = image_gradient(net, torch.rand(3, 32, 32, generator=rng), torch.tensor(1))
    images, label = reconstruct(net, target, steps=40, inner=2, kept=5, rng=rng)
    assert int(label) == 1
    assert images.shape == (5, 3, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    start = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert mismatch(net, images[-1], label, target) < 0.5 * mismatch(net, start, label, target)


def test_glfc_selects_best_model_on_reconstructions(
    small_method, backbone, tasks, rng, monkeypatch
):
    method = small_method("glfc")
    state = method.begin_task({}, tasks[0], backbone, rng)
    best = []
    for accuracy, bias in ((0.5, 1.0), (0.2, 2.0), (0.5, 3.0), (0.4, 4.0)):
        monkeypatch.setattr(
            type(method), "monitor_accuracy", lambda *_, a=accuracy: torch.tensor(a)
        )
        aggregate = {
            **select(state, *method.training().optims),
            "head.bias": torch.full((7,), bias),
        }
        state = method.server_update(state, aggregate, server_context(tasks[0], backbone, rng))
        best.append(float(state["best.head.bias"][0]))
    assert best == [1.0, 1.0, 3.0, 3.0]  # an equally good model replaces the best
    pool = image_gradient(state, torch.rand(3, 32, 32), torch.tensor(1))
    upload = {**aggregate, **{f"image_gradient.{k}": v[None] for k, v in pool.items()}}
    for keep, best_bias in ((False, 5.0), (True, 3.0)):  # not comparable
        quick = small_method("glfc", best_perf_no_reset=keep, inversion_steps=1)
        fresh = {**upload, "head.bias": torch.full((7,), 5.0)}
        new_state = quick.server_update(state, fresh, server_context(tasks[0], backbone, rng))
        assert float(new_state["best.head.bias"][0]) == best_bias
        assert float(new_state["best.accuracy"]) == pytest.approx(0.5 if keep else 0.4)
    for reset, accuracy in ((False, 0.0), (True, 0.5)):
        quirk = small_method("glfc", best_perf_no_reset=reset)
        assert float(quirk.begin_task(state, tasks[1], backbone, rng)["best.accuracy"]) == accuracy
    assert float(method.begin_task(state, tasks[1], backbone, rng)["old.head.bias"][0]) == 3.0
