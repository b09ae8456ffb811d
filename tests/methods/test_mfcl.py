"""MFCL: the generator's steps against recorded outputs of the official code, the client by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Payload, Task, Tree, create_method
from fczoo.aggregators.averaging import uniform
from fczoo.baselines._data_free_replay import Moments, Reply, enlarge
from fczoo.baselines._mfcl_generator import (
    GeneratorConfig,
    blur,
    divergence_of,
    generator_step,
    imbalance,
    mfcl_generator,
    mfcl_images,
    standard_normal,
)
from fczoo.core.tree import strip_prefix
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_golden import F32, compare, golden

LAYERS = {
    "linear": "l1.0",
    "norm0": "conv_blocks0.0",
    "conv0": "conv_blocks1.0",
    "norm1": "conv_blocks1.1",
    "conv1": "conv_blocks2.0",
    "norm2": "conv_blocks2.1",
    "conv2": "conv_blocks2.3",
    "norm3": "conv_blocks2.5",
}
PARTS = {"mean": "running_mean", "var": "running_var"}
STEPS = 1e-3  # tolerance after Adam, which takes full steps for tiny gradients


def generator_of(g: Tree, prefix: str) -> Tree:
    """Return a recorded generator under the names of this package."""
    names = mfcl_generator(4, 2, 8, torch.Generator())
    tree = {}
    for name in names:
        layer, _, part = name.partition(".")
        official = f"{prefix}.{LAYERS[layer]}.{PARTS.get(part, part)}"
        if official in g:
            tree[name] = g[official].clone()
    return tree


def teacher_of(g: Tree) -> object:
    """Return the recorded old model, a small convolutional network."""
    net = strip_prefix(g, "in.teacher.")

    def norm(maps: Tensor, name: str) -> Tensor:
        parts = [
            net[f"feature.{name}.{p}"] for p in ("running_mean", "running_var", "weight", "bias")
        ]
        return F.batch_norm(maps, *parts)

    def reply(images: Tensor) -> Reply:
        maps = F.relu(norm(F.conv2d(images, net["feature.conv.weight"], padding=1), "bn"))
        maps = F.conv2d(maps, net["feature.conv2.weight"], stride=2, padding=1)
        maps = F.relu(norm(maps, "bn2"))
        features = maps.mean((2, 3))
        return Reply(F.linear(features, net["fc.weight"], net["fc.bias"]), features, [])

    return reply


def test_three_generator_steps() -> None:
    """Compare images, the first gradients, weights and running statistics of the official code."""
    g = golden("mfcl_generator_nobn")
    content, temperature, entropy, prior, smooth = g[
        "in.weights_content_temperature_ie_bn_smooth"
    ].tolist()
    config = GeneratorConfig(3, 6, float(g["in.lr"]), content, temperature, entropy, smooth, prior)
    generator, teacher = generator_of(g, "in.generator"), teacher_of(g)
    weights = {
        k: v.requires_grad_() for k, v in generator.items() if not k.endswith((".mean", ".var"))
    }
    optimizer = torch.optim.Adam(weights.values(), config.lr_generator)
    for step, z in enumerate(g["in.z"]):
        images = generator_step(generator, optimizer, z, config, teacher, [], 8)
        compare("mfcl_generator_nobn, after Adam", images, g["out.images"][step], STEPS)
        if step == 0:
            compare("mfcl_generator_nobn", images, g["out.images"][0], F32)
            recorded = generator_of(g, "out.grad0")
            assert len(recorded) == 12  # gradients of biases before a norm are not recorded
            for name, gradient in recorded.items():
                compare("mfcl_generator_nobn", weights[name].grad, gradient, 1e-4, name)
            compare(
                "mfcl_generator_nobn",
                imbalance(teacher(images).logits),
                g["check.information_entropy"],
                1e-4,
            )
            compare("mfcl_generator_nobn", blur(images), g["check.smooth_images0"], F32)
    for name, value in generator_of(g, "out.generator").items():
        # Running means include biases before their norms, whose gradients are rounding errors.
        drifts = name in ("norm1.mean", "norm2.mean")
        tolerance = 5 * STEPS if drifts else STEPS
        compare("mfcl_generator_nobn, after Adam", generator[name], value, tolerance, name)


def test_server_averages_with_equal_weights() -> None:
    g = golden("mfcl_server")
    uploads = [
        Payload({k: v.float() for k, v in strip_prefix(g, f"in.local{i}.").items()}, i, 10**i)
        for i in range(3)
    ]
    for name, value in uniform(uploads).items():
        compare("mfcl_server", value, g[f"out.average.{name}"].to(value), F32, name)
    assert create_method("mfcl").training().averaging == "uniform"


def test_generator_size_and_running_statistics() -> None:
    """Count 8,423,939 weights at 32 pixels; in eval mode an image does not depend on its batch."""
    tree = mfcl_generator(1000, 64, 32, torch.Generator().manual_seed(0))
    weights = [v.numel() for k, v in tree.items() if not k.endswith((".mean", ".var"))]
    assert sum(weights) == 8_423_939
    small = mfcl_generator(4, 2, 8, torch.Generator().manual_seed(0))
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    images = mfcl_images(small, z, 8)
    torch.testing.assert_close(mfcl_images(small, z[:1], 8), images[:1])
    before = small["norm3.mean"].clone()
    assert not torch.equal(mfcl_images(small, z, 8, training=True), images)
    assert not torch.equal(small["norm3.mean"], before)


def test_client_loss_by_hand() -> None:
    """Compute the loss of an image of a new class and a generated image, after two old classes."""
    method, task = create_method("mfcl", weight_head=2.0, weight_feature=3.0), Task(1, 2, 3, 3, 2)
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    train = {"head.weight": rows.clone().requires_grad_(), "head.bias": torch.zeros(3)}
    old = {"head.weight": rows, "head.bias": torch.zeros(3)}
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    old_features = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    batch = Batch(features[:1], torch.tensor([2]), torch.ones(1), features[:1])
    joint = batch._replace(w=torch.ones(2))
    loss = method.client_loss(train, old, batch, joint, features, old_features, task)
    # New class alone in the softmax: 0. Head: image one has logits 1, 0, 0 and label 2; image two
    # logits 0, 2, 0 and the label of the old model's logits 1 and 2, which is class 1.
    first = math.log(math.e + 2)
    second = math.log(2 + math.e**2) - 2
    # Features through the old rows differ by (0, -2) and (-1, 0): squares 4 and 1, two classes.
    expected = 2.0 * (first + second) / 2 + 3.0 * (4 / 2 + 1 / 2) / 2
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    # d / df of the last term only: 3 * mean over two images of difference @ rows, 2 / 2 classes
    assert features.grad.tolist() == [[0.0, -6.0], [-1.5, 0.0]]
    padded = joint._replace(w=torch.tensor([1.0, 0.0]))
    loss = method.client_loss(train, old, batch, padded, features, old_features, task)
    assert float(loss.detach()) == pytest.approx(2.0 * first + 3.0 * 2)


def test_generator_loss_terms_by_hand() -> None:
    even, certain = torch.zeros(2, 4), torch.tensor([[50.0, 0.0], [50.0, 0.0]])
    assert float(imbalance(even)) == pytest.approx(0, abs=1e-6)
    assert float(imbalance(certain)) == pytest.approx(1)
    assert float(imbalance(torch.zeros(3, 1))) == 0  # a single class: no division by log 1
    prior = Moments(torch.tensor([1.0]), torch.tensor([4.0]))
    batch = Moments(torch.tensor([3.0]), torch.tensor([2.0]))
    # log(s / s_prior) = -log(2) / 2; -1/2 (1 - (4 + 4) / 2) = 3/2
    assert float(divergence_of(batch, prior)) == pytest.approx(1.5 - math.log(2) / 2)
    assert float(divergence_of(prior, prior)) == pytest.approx(0, abs=1e-7)
    point = torch.zeros(1, 3, 9, 9)
    point[0, 0, 4, 4] = 1
    blurred = blur(point)
    assert float(blurred.sum()) == pytest.approx(1)
    assert float(blurred[0, 0, 4, 5] / blurred[0, 0, 4, 4]) == pytest.approx(math.exp(-1 / 4))
    assert enlarge(point, 18).shape[-1] == 18


def test_client_noise_is_standard_normal() -> None:
    """Map quantiles 0.5 and 0.84 to 0 and 1, and 0 to a finite value."""
    normal = standard_normal(torch.tensor([0.5, 0.8413447, 0.0]))
    assert normal[:2].tolist() == pytest.approx([0, 1], abs=1e-5)
    assert -6 < float(normal[2]) < -5


def test_generator_is_reused_and_survey_uploads_moments() -> None:
    """Use one generator in all tasks; with ``prior=survey`` clients send moments of a block."""
    record = record_run(toy_bench(rounds=1, epochs=1), small_method("mfcl"))
    generators = [strip_prefix(call.state, "generator.") for call in record.rounds]
    assert not generators[0]
    assert generators[1].keys() == generators[2].keys()
    change = generators[2]["conv2.weight"] - generators[1]["conv2.weight"]
    # three steps of Adam at 1e-3 are at most this large; a new generator differs by more
    assert 0 < float(change.abs().max()) < 4e-3
    assert not [call for call in record.calls if call.phase == "task_end"]
    survey = small_method("mfcl", prior="survey", prior_blocks=(1,), generator_steps=1)
    record = record_run(toy_bench(rounds=1, epochs=1), survey)
    (call, *_) = [call for call in record.calls if call.phase == "task_end"]
    assert {*call.payloads[0]} == {"moments.1.sum", "moments.1.squares"}
    moments = call.payloads[0]
    # a sum of squares is at least the squared sum over the number of images
    least = moments["moments.1.sum"].square() / call.payloads[0].num_samples
    assert (moments["moments.1.squares"] >= least * (1 - 1e-9)).all()
    assert strip_prefix(record.rounds[1].state, "generator.")


def test_zero_replay_ratio_creates_no_generator() -> None:
    """Create no generator at the server or clients; use only the loss terms of real images."""
    record = record_run(toy_bench(rounds=1, epochs=1), small_method("mfcl", ratio=0))
    assert not any(strip_prefix(call.state, "generator.") for call in record.rounds)
    assert [len(row) for row in record.result.accuracy] == [1, 2, 3]
